"""The options and arguments that several commands share, and the run or the job that they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchkit.cli.frame import Result, say, show

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
    """An option that sets a key of the job; ``given_keys`` finds it among the arguments."""
    text += f" ({key})." + " May be repeated." * attributes.get("multiple", False)
    return click.option(flag, key.replace(".", "__"), help=text, **attributes)


def given_keys(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the job that options have set, of ``arguments`` that all come from ``of_key``."""
    return {
        name.replace("__", "."): [*value] if isinstance(value, tuple) else value
        for name, value in arguments.items()
        if value not in (None, ())
    }


def setting(flag: str, name: str, text: str) -> Callable[[Any], Any]:
    def checked(context: click.Context, option: click.Parameter, given: Texts) -> Texts:
        """Before click reports the second word of ``--set limit 5`` as an argument too many."""
        if any("=" not in text for text in given):
            from batchkit.config.loading import check_override

            for text in given:
                check_override(text, flag)
        return given

    return click.option(flag, name, multiple=True, metavar="KEY=VALUE", callback=checked, help=text)


def export_format(flag: str, text: str) -> Callable[[Any], Any]:
    """A format of an export; its PATH may be left out."""
    return click.option(flag, help=text, **_MAY_NAME_A_PATH)


class Export(click.Command):
    """A command with a flag for each format of an export that another package adds."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from batchkit.config.seams import EXPORTS

        known = {option for param in self.params for option in param.opts}
        for name, point in EXPORTS.added.items():
            if f"--{name}" not in known:
                text = f"As {point.value.partition(':')[0]} writes it."
                self.params.insert(-1, click.Option([f"--{name}"], help=text, **_MAY_NAME_A_PATH))
        return super().get_params(ctx)


COUNT = click.IntRange(1)
CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}
FILE = click.Path(path_type=Path)
JOB = click.argument("job", type=FILE)
RUN = click.argument("run", required=False, type=click.Path())  # so that a shell completes it
SET = setting(
    "--set",
    "overrides",
    "Override one key of the job, dotted: sampling.temperature=0. May be repeated.",
)
NOTIFY = of_key(
    "run.on_end",
    "--notify",
    "When the run has ended or was stopped, run COMMAND with the last line of JSON on its stdin",
    metavar="COMMAND",
)
MEDIA = click.option(
    "--media",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    metavar="DIR",
    help="Inputs and images may be read below DIR; by default, where the run's own job file has them, if it"
    " is here. May be repeated.",
)
TRUST = click.option(
    "--trust",
    is_flag=True,
    help="Execute, import and send what only a run folder's job.toml says, and keys to other hosts than before.",
)
LIMIT = of_key(
    "input.limit", "--limit", "Only the first N rows, after the job's filter", type=COUNT
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


def printed(command: Callable[..., Result]) -> Callable[..., None]:
    """A command that returns its result: prints it (with --json as JSON) and exits."""

    @JSON
    @wraps(command)
    def run(*, as_json: bool, **given: Any) -> None:
        found = command(**given)
        show(found, as_json)
        raise SystemExit(getattr(found, "exit_code", 0))

    return run


def find(run: str | None, overrides: Texts = ()) -> Path:
    """The run folder; if it was not named, prints on stderr which one it is."""
    from batchkit.runs.listing import find_run

    folder = find_run(run, overrides)
    if run is None:
        say(str(folder))
    return folder


def job_file(run: str | None) -> Path | None:
    """``run`` if it is a job file, not a run folder."""
    return Path(run) if run is not None and Path(run).is_file() else None


def load(
    job: Path,
    overrides: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
    *,
    of: tuple[str, ...] = ("rollout", "engine"),
    trust: bool = False,
) -> JobConfig:
    """The job in a file; prints what it will execute, import and send, of the keys that begin with one
    ``of`` these."""
    from batchkit.commands.trust import vouched
    from batchkit.config.loading import load_job

    loaded = load_job(job, overrides, given or {})
    return vouched(loaded, say, of=of, trust=trust, overrides=overrides)
