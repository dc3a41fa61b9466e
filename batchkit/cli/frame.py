"""Code around every command: prints its result or its error, and sets the exit code."""

from __future__ import annotations

import json
from typing import Any, Protocol

import click

from batchkit.config.masking import masked_text
from batchkit.config.terminal import plain
from batchkit.errors import BatchkitError, limit_reached

GROUPS = {
    "Run": ("run", "init", "validate", "plan", "retry-failed", "status", "merge"),
    "Look": ("show", "view", "report", "compare"),
    "Results": ("export", "score", "verify"),
    "Tune": ("tune", "find-bs"),
    "Serve": ("serve",),
    "Tools": ("doctor", "demo"),
}
"""Commands by heading, in the order of ``batchkit --help``."""


class Result(Protocol):
    """The result of a command. It may have an ``exit_code``; without one, the command exits with 0."""

    def to_text(self) -> str: ...

    def to_json(self) -> Any: ...


class Cli(click.Group):
    """The root command: groups commands under headings, and turns errors into a message and an exit code."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(60)) for name in names]
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from batchkit.config.suggest import called_here

        name, *rest = args
        if name in self.commands and not ctx.resilient_parsing:
            _check_given_once(click.Context(self.commands[name], ctx, name), rest)
        here = (
            f"batchkit run {name}" if name.endswith(".toml") else called_here(name, kind="batchkit")
        )
        if name in self.commands or here is None:
            return super().resolve_command(ctx, args)
        resumes = ", which also resumes an interrupted run" * here.startswith("batchkit run")
        raise click.UsageError(f"No such command {name!r}. Did you mean {here!r}{resumes}?", ctx)

    def invoke(self, ctx: click.Context) -> Any:
        from batchkit.errors import Interrupted

        try:
            return super().invoke(ctx)
        except BatchkitError as error:
            echo(f"batchkit: error: {error}", err=True)
            ctx.exit(error.exit_code)
        except click.UsageError as error:  # the message quotes the command line
            message = error.format_message()
            if (shown := plain(masked_text(_in_our_words(error)))) == message:
                raise
            raise click.UsageError(shown, error.ctx) from None
        except Interrupted as stop:
            echo(f"batchkit: stopped by {stop}; run the same command to continue", err=True)
            ctx.exit(128 + stop.signum)
        except KeyboardInterrupt:
            echo("batchkit: interrupted", err=True)
            ctx.exit(130)
        except ImportError as error:  # one of batchkit's own packages is missing or broken
            reason, package = " ".join(str(error).split()), (error.name or "").partition(".")[0]
            install = (
                f"install it again: pip install --force-reinstall {package or 'batchkit-vllm'}"
            )
            echo(f"batchkit: error: {reason}; {install}", err=True)
            ctx.exit(2)
        except (RecursionError, MemoryError) as error:  # the last resort: a traceback does not help
            echo(f"batchkit: error: {limit_reached(error)}", err=True)
            ctx.exit(1)


def _check_given_once(ctx: click.Context, args: list[str]) -> None:
    """Raise UsageError if an option that takes one value is given twice; click would silently use the last one."""
    _, _, given = ctx.command.make_parser(ctx).parse_args([*args])
    for option in given:
        is_single = isinstance(option, click.Option) and not (option.multiple or option.is_flag)
        if is_single and given.count(option) > 1:
            several = "; a quoted glob reads several files" * (option.opts[0] == "--input")
            raise click.UsageError(
                f"{option.opts[0]} is given twice, but may be given only once: keep one{several}",
                ctx,
            )


def _in_our_words(error: click.UsageError) -> str:
    """Return the message of a click error, with batchkit's option in place of another tool's, or with a remedy."""
    from batchkit.config.suggest import QUOTE

    if isinstance(error, click.NoSuchOption) and (here := _option_for(error)) is not None:
        return f"No such option {error.option_name!r}. Did you mean {here!r}?"
    message = error.format_message()
    remedies = {
        "show": "; select a row with --id ID",
        "report": "; to compare runs: batchkit compare RUN RUN",
        "run": f"; {QUOTE}",
    }
    command = error.ctx.command.name if error.ctx else None
    if command == "merge" and isinstance(error, click.MissingParameter):
        return "--into is missing: batchkit merge output/a output/b --into output/ab"
    return message + (remedies.get(command or "", "") if "extra argument" in message else "")


def _option_for(error: click.NoSuchOption) -> str | None:
    """Return batchkit's option, or ``--set KEY=…``, for an unknown option that has this name in other tools."""
    from batchkit.config.suggest import called_here

    name = error.option_name
    here = called_here(name, kind="--") or called_here(name.lstrip("-").replace("-", "_"))
    options = {} if error.ctx is None else {p.name: p.opts[0] for p in error.ctx.command.params}
    if here is None or here in options.values():
        return here
    flag = options.get(here.replace(".", "__"))
    return flag or (f"--set {here}=…" if "." in here and "overrides" in options else None)


def show(result: Result, as_json: bool) -> None:
    echo(json.dumps(result.to_json()) if as_json else result.to_text())


def echo(text: object, *, err: bool = False) -> None:
    """Print ``text``. Control characters from rows and answers are escaped; on stderr, secrets are masked."""
    click.echo(plain(masked_text(str(text)) if err else str(text)), err=err)


def say(text: str) -> None:
    echo(text if text.startswith("|") else f"batchkit: {text}", err=True)


def say_summary(summary: Any, *, was_retry: bool = False) -> None:
    """Print the summary of a run on stderr."""
    for line in summary.to_text(was_retry=was_retry).split("\n"):
        say(line)
