"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchkit.cli.frame import Result, say, show
from batchkit.errors import JobError

if TYPE_CHECKING:
    from batchkit.config.tables import JobConfig


Texts = tuple[str, ...]
_MAY_NAME_A_PATH: dict[str, Any] = {"is_flag": False, "flag_value": "", "metavar": "[PATH]"}


def rows(text: str, default: int | None = None) -> Callable[[Any], Any]:
    return click.option("--rows", type=COUNT, default=default, help=text)


def seconds(text: str, default: float) -> Callable[[Any], Any]:
    over_0 = click.FloatRange(0, min_open=True)
    return click.option("--seconds", type=over_0, default=default, help=text)


def of_key(key: str, flag: str, text: str, **attributes: Any) -> Callable[[Any], Any]:
    """Return a click option that sets ``key`` of the job. ``given_keys`` turns the parsed arguments back into job
    keys."""
    text += f" ({key})." + " May be repeated." * attributes.get("multiple", False)
    return click.option(flag, key.replace(".", "__"), help=text, **attributes)


def given_keys(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job keys that the user set on the command line, from the ``arguments`` of options made by
    ``of_key``."""
    return {
        name.replace("__", "."): [*value] if isinstance(value, tuple) else value
        for name, value in arguments.items()
        if value not in (None, ())
    }


def setting(flag: str, name: str, text: str) -> Callable[[Any], Any]:
    def checked(context: click.Context, option: click.Parameter, given: Texts) -> Texts:
        """Reject a value without ``=`` here, because for ``--set limit 5`` click would only report ``5`` as an extra
        argument."""
        if any("=" not in text for text in given):
            from batchkit.config.loading import check_override

            for text in given:
                check_override(text, flag)
        return given

    return click.option(flag, name, multiple=True, metavar="KEY=VALUE", callback=checked, help=text)


def export_format(flag: str, text: str) -> Callable[[Any], Any]:
    """Return the click option for an export format. Its PATH may be left out."""
    return click.option(flag, help=text, **_MAY_NAME_A_PATH)


class Export(click.Command):
    """The ``export`` command. It has one more option for each export format of a plug-in."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from batchkit.config.seams import EXPORTS

        known = {option for param in self.params for option in param.opts}
        added = [flag for name in EXPORTS.names() if (flag := f"--{name}") not in known]
        *params, as_json, show_help = super().get_params(ctx)
        formats = (_PlugInFormat([flag], **_MAY_NAME_A_PATH) for flag in added)
        return [*params, *formats, as_json, show_help]


class _PlugInFormat(click.Option):
    """The option for the export format of a plug-in. Its help is the first line of the function's docstring."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from batchkit.commands.export.outputs import export_of

        described = export_of(self.opts[0].removeprefix("--")).write.__doc__ or ""
        self.help = described.strip().partition("\n")[0]
        return super().get_help_record(ctx)


COUNT = click.IntRange(1)
CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}
FILE = click.Path(path_type=Path)
JOB = click.argument("job", type=FILE)
RUN = click.argument("run", required=False, type=click.Path())  # the shell completes a Path
SET = setting(
    "--set",
    "overrides",
    "Override a key of the job file: sampling.temperature=0. May be repeated.",
)
NOTIFY = of_key(
    "run.on_end",
    "--notify",
    "Command to start when the run ends or stops; it gets the run's last line of JSON on stdin",
    metavar="COMMAND",
)
MEDIA = click.option(
    "--media",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    metavar="DIR",
    help="Allow reading inputs and images below DIR; default the folders in the run's job file, if that file exists."
    " May be repeated.",
)
FRESH = click.option(
    "--fresh", is_flag=True, help="Start a new run, and keep the old folder as <name>.1."
)
ON_CHANGE = click.option(
    "--on-change",
    type=click.Choice(["fail", "new", "requeue"]),
    default="fail",
    help="What to do if the job or the input changed since the run started: fail with a diff, start a new run, or"
    " requeue the rows that the change affects.",
)
TRUST = click.option(
    "--trust",
    is_flag=True,
    help="Allow code, modules, commands and hosts that only the job.toml of a run folder names.",
)
LIMIT = of_key(
    "input.limit",
    "--limit",
    "Maximum number of rows, after the job's filter; default all",
    type=COUNT,
)
JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of text."
)


def printed(command: Callable[..., Result]) -> Callable[..., None]:
    """Decorate a command so that it prints the result that it returns (as JSON with --json) and exits."""

    @JSON
    @wraps(command)
    def run(*, as_json: bool, **given: Any) -> None:
        found = command(**given)
        show(found, as_json)
        raise SystemExit(getattr(found, "exit_code", 0))

    return run


def find(run: str | None, overrides: Texts = (), *, changes: bool = False) -> Path:
    """Return the run folder, and print it on stderr if the user did not name it. With ``changes``, the command writes to
    the run, so an address in a store is refused."""
    from batchkit.runs.listing import find_run
    from batchkit.storage.store.objects import is_store

    if changes and run is not None and is_store(run):
        raise JobError(
            f"{run}: this command changes the run, and the run is in a store; restore it with `batchkit run {run}`, and"
            " name the run folder"
        )
    folder = find_run(run, overrides)
    if run is None:
        say(str(folder))
    return folder


def on_this_machine(job: str | None, overrides: Texts) -> tuple[Path | None, Texts]:
    """Return the job file and the overrides of ``batchkit run JOB``. If JOB is the address of a run in a store, the run is
    first restored below output/."""
    from batchkit.runs.remote import restored
    from batchkit.storage.store.objects import is_store

    if job is None or not is_store(job):
        return None if job is None else Path(job), overrides
    file = restored(job, output := Path("output").absolute())
    here = (f"output.dir={output}", f"name={file.parent.name}")
    return file, (*here, *overrides)


def job_file(run: str | None) -> Path | None:
    """Return ``run`` if it is a job file, or None if it is a run folder."""
    return Path(run) if run is not None and Path(run).is_file() else None


def load(
    job: Path,
    overrides: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
    *,
    of: tuple[str, ...] = ("rollout", "engine"),
    trust: bool = False,
) -> JobConfig:
    """Return the job in a file. First print the side effects of the job: code to execute or import, and addresses to
    send to.

    ``of``: consider only side effects whose key starts with one of these prefixes.
    """
    from batchkit.commands.trust import vouched
    from batchkit.config.loading import load_job

    loaded = load_job(job, overrides, given or {})
    return vouched(loaded, say, of=of, trust=trust, overrides=overrides)
