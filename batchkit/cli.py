"""The command line: parse, call one function, print, set the exit code.

Results go to stdout, progress and errors to stderr. Imports are inside the commands, so that
``--help`` answers at once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from batchkit import __version__
from batchkit.config.masking import masked, masked_text
from batchkit.config.terminal import plain
from batchkit.errors import BatchkitError, JobError

JOB = click.argument("job", type=click.Path(path_type=Path))
RUN = click.argument("run", required=False)
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one key of the job, dotted: sampling.temperature=0. May be repeated.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


class Cli(click.Group):
    """Turns our errors into a message on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        from batchkit.execution.signals import Interrupted

        try:
            return super().invoke(ctx)
        except BatchkitError as error:
            _print(f"batchkit: error: {error}", err=True)
            ctx.exit(error.exit_code)
        except click.UsageError as error:  # it quotes the command line
            told = error.format_message()
            if (shown := plain(masked_text(told))) == told:
                raise
            raise click.UsageError(shown, error.ctx) from None
        except Interrupted as stop:
            _print(f"batchkit: stopped by {stop}; run the same command to go on", err=True)
            ctx.exit(128 + stop.signum)
        except KeyboardInterrupt:
            _print("batchkit: interrupted", err=True)
            ctx.exit(130)
        except (RecursionError, MemoryError) as error:  # the last resort: a traceback does not help
            _print(f"batchkit: error: {_told(error)}", err=True)
            ctx.exit(1)


@click.group(cls=Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="batchkit")
def cli() -> None:
    """Put many prompts, with images, through a model that you run yourself.

    RUN is a run folder or the job file that made it; left out, the run under output/ that was
    started last.

    \b
    Exit codes: 0 all rows ok · 1 stopped, can be resumed · 2 bad command line or job file ·
    3 finished, some rows failed · 130 / 143 interrupted by SIGINT / SIGTERM, resumable.
    """


@cli.command()
@JOB
@click.option(
    "--limit", type=click.IntRange(1), help="Only the first N rows (after the job's filter)."
)
@click.option(
    "--shard",
    metavar="I/N",
    help="Only share I (from 0) of N of those rows, in a run folder of its own,"
    " <name>.shard-I-of-N. auto: I and N from a SLURM job array.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="N engines on Ray, each with its own GPUs (tensor_parallel_size × pipeline_parallel_size).",
)
@click.option(
    "--ray-address",
    metavar="ADDRESS",
    help="The cluster that --workers run on; left out, RAY_ADDRESS, or else this machine alone.",
)
@SET
@click.option("--fresh", is_flag=True, help="Start a new run; the old folder is kept as <name>.1 …")
@click.option(
    "--on-change",
    type=click.Choice(["fail", "new", "requeue"]),
    default="fail",
    show_default=True,
    help="When job or input changed since the run began: stop with a diff, begin a new run, or"
    " run again what the change touches.",
)
@click.option(
    "--skip-from",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Also skip rows whose id is already ok in that other run (without input.id: whose index and"
    " fields are).",
)
@click.option("--dry-run", is_flag=True, help="Print the first 3 rows as the engine gets them.")
def run(
    job: Path,
    limit: int | None,
    shard: str | None,
    workers: int | None,
    ray_address: str | None,
    overrides: tuple[str, ...],
    fresh: bool,
    on_change: Any,
    skip_from: Path | None,
    dry_run: bool,
) -> None:
    """Run JOB, or carry on where it stopped.

    The last line on stdout is a JSON object with the counts.
    """
    from batchkit.commands.run import run_job
    from batchkit.config.loading import load_job
    from batchkit.config.shard import asked_for
    from batchkit.storage.summary import RunSummary

    if limit is not None:
        overrides = (*overrides, f"input.limit={limit}")
    if workers is not None:
        overrides = (*overrides, f"run.workers={workers}")
    if ray_address is not None:
        overrides = (*overrides, f"run.ray_address={ray_address}")
    loaded = load_job(job, overrides)
    if shard is not None:
        loaded = loaded.of_shard(asked_for(shard, os.environ))
    if dry_run:
        _show_rows(loaded, 3 if limit is None else limit)
        return
    try:
        summary = run_job(loaded, fresh=fresh, on_change=on_change, skip_from=skip_from, say=_say)
    except BatchkitError as error:
        if isinstance(error.summary, RunSummary) and error.exit_code == 1:
            _print(json.dumps(error.summary.to_json()))
        raise
    _tell(summary, f"batchkit retry-failed {summary.folder}")
    _print(json.dumps(summary.to_json()))
    raise SystemExit(summary.exit)


@cli.command()
@JOB
@click.option("--rows", type=click.IntRange(1), help="Only the first N rows.")
@SET
@JSON
def validate(job: Path, rows: int | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check every row of JOB without loading the model: template, media, exact length, ids.

    Writes nothing. Exits with 3 if a row would fail.
    """
    from batchkit.commands.validate import validate as check
    from batchkit.config.loading import load_job

    found = check(load_job(job, overrides), rows)
    if as_json:
        _print(json.dumps(found.to_json()))
    else:
        tokens = ", ".join(f"{name} {count:,.0f}" for name, count in found.prompt_tokens.items())
        _print(f"{found.rows:,} rows: {found.ok:,} ok, {found.failed:,} would fail")
        _print(f"prompt tokens: {tokens or ('not counted' if found.ok else 'none')}")
        for problem in found.problems:
            _print(f"  row {problem.index} (id {problem.id}) {problem.kind}: {problem.message}")
        if found.failed > len(found.problems):
            _print(f"  … and {found.failed - len(found.problems):,} more")
    raise SystemExit(3 if found.failed else 0)


@cli.command()
@RUN
@JSON
def status(run: str | None, as_json: bool) -> None:
    """Counts, failures by kind, rate and ETA of RUN, and who works on it."""
    from batchkit.commands.status import status as look
    from batchkit.execution.progress import duration

    found = look(_find(run))
    if as_json:
        _print(json.dumps(found.to_json()))
        return
    held = found.held_by
    total = "?" if found.total is None else f"{found.total:,}"
    pending = "?" if found.pending is None else f"{found.pending:,}"
    _print(f"{found.name}: {found.ok:,} ok, {found.failed:,} failed, {pending} of {total} to do")
    for kind, count in found.failed_by_kind.items():
        _print(f"  failed by {kind}: {count:,}")
    _print(f"tokens: {found.prompt_tokens:,} prompt, {found.completion_tokens:,} completion")
    _print(f"starts: {found.starts}, engine restarts: {found.engine_restarts}")
    for event in found.engine_events[-5:]:
        _print(f"  {event}")
    for worker in found.workers:
        gpus = f", GPU {', '.join(map(str, worker['gpus']))}" if worker["gpus"] else ""
        state = f" {worker['state']}," if held or worker["state"] == "given up" else ""
        _print(
            f"worker {worker['worker']} on {worker['node'] or 'no node'}{gpus}:{state}"
            f" {worker['rows']:,} rows, {worker['rows_per_s']:.1f} rows/s, {worker['in_flight']} in flight,"
            f" {worker['restarts']} restarts, {worker['engine_restarts']} of its engine"
        )
    _print("the log was not checked for damage; `batchkit verify` does that")
    for name, value in found.engine_settings.items():
        _print(f"memory ran out, so now {name} = {value}")
    if held is None:
        _print("no process works on it")
    else:
        eta = "" if found.eta_s is None else f", {duration(found.eta_s)} left"
        rate = "" if found.rows_per_s is None else f": {found.rows_per_s:.1f} rows/s{eta}"
        _print(f"process {held['pid']} on {held['host']} works on it{rate}")


@cli.command("retry-failed")
@RUN
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    help="Only failures of this kind (template, media, prompt_too_long, …). May be repeated.",
)
@SET
@JSON
def retry_failed(
    run: str | None, kinds: tuple[str, ...], overrides: tuple[str, ...], as_json: bool
) -> None:
    """Run again the rows of RUN that failed or came back empty, and append what comes of it.

    Rows that are ok are not touched. --set holds for this start alone. Secrets are not kept in a run
    folder: where RUN is the job file, they are read from there. Exits with 1 if rows of RUN have no
    record yet.
    """
    from batchkit.commands.run import retry_failed as again
    from batchkit.types import ERROR_KINDS

    for kind in kinds:
        if kind not in ERROR_KINDS:
            raise JobError(f"--kind {kind}: known kinds are {', '.join(ERROR_KINDS)}")
    folder = _find_to_read(run)
    found = again(folder, kinds=kinds, overrides=overrides, job_file=_job_file(run), say=_say)
    by_kind = ", ".join(f"{count} {kind}" for kind, count in found.by_kind.items())
    if as_json:
        _print(
            json.dumps(
                {"rows": found.rows, "by_kind": found.by_kind, "recovered": found.recovered}
                | ({} if found.summary is None else found.summary.to_json())
            )
        )
    elif found.summary is None:
        _print("nothing to retry: no row failed" + (f" by {', '.join(kinds)}" if kinds else ""))
    else:
        _print(f"retried {found.rows} rows ({by_kind}): {found.recovered} recovered")
    if found.summary is not None:
        _tell(found.summary, f"batchkit status {folder}")
        raise SystemExit(found.summary.exit)


@cli.command()
@RUN
@click.option("--parquet", is_flag=False, flag_value="", metavar="[PATH]", help="zstd Parquet.")
@click.option(
    "--jsonl", is_flag=False, flag_value="", metavar="[PATH]", help="Records as they are."
)
@click.option("--csv", is_flag=False, flag_value="", metavar="[PATH]", help="The Parquet columns.")
@click.option(
    "--safe-csv",
    is_flag=True,
    help="As --csv, for a spreadsheet: a text that it would run as a formula gets a ' in front.",
)
@click.option(
    "--openai", is_flag=False, flag_value="", metavar="[PATH]", help="OpenAI batch output files."
)
@click.option(
    "--realhit",
    is_flag=False,
    flag_value="",
    metavar="[PATH]",
    help="results_<time>.json and checkpoint.json of RealHiTBench's harness.",
)
@JSON
def export(run: str | None, safe_csv: bool, as_json: bool, **formats: str | None) -> None:
    """Write the newest record of each row of RUN, with its newest scores, in the order of the input.

    PATH left out: a file (--realhit: a folder) in the run folder.
    """
    from batchkit.commands.export import export as write

    wanted = {name: path for name, path in formats.items() if path is not None}
    if safe_csv:
        wanted["safe-csv"] = wanted.pop("csv", "")
    if not wanted:
        raise JobError("name a format: --parquet, --jsonl, --csv, --openai or --realhit")
    run = run or _run_taken_for_path(wanted)
    folder = _find_to_read(run)
    for name, path in wanted.items():
        for file in write(folder, name, Path(path) if path else None):
            ratio = file.bytes / file.source_bytes if file.source_bytes else 0.0
            if as_json:
                line = file._asdict() | {"path": str(file.path), "format": name}
                _print(json.dumps(line | {"ratio": round(ratio, 4)}))
            else:
                _print(
                    f"{file.path}: {file.rows:,} rows, {file.bytes:,} bytes,"
                    f" {ratio:.2f} of results.jsonl's {file.source_bytes:,}"
                )


@cli.command()
@RUN
@click.option(
    "--predictions",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Score these instead (JSONL, or the results JSON of RealHiTBench's harness).",
)
@click.option(
    "--job",
    type=click.Path(path_type=Path),
    metavar="JOB",
    help="The job whose input and [scoring] count.",
)
@SET
@JSON
def score(
    run: str | None,
    predictions: Path | None,
    job: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Score the answers of RUN again, without the model, and print the table.

    Where RUN is a job file, or --job names one, its [scoring] counts; else that of the run. Scores
    are percentages, rewards 0 to 10. Failed rows are not scored, and unscored ones are no 0.
    """
    from batchkit.commands.score import score_predictions, score_run

    if predictions is not None:
        table, missing = score_predictions(_job_of_rows(run, job, overrides), predictions, _say)
        found: dict[str, Any] = {**table.to_json(), "missing": missing}
    else:
        for override in overrides:
            if not override.startswith(("scoring.", "name=", "output.dir=")):
                raise JobError(
                    f"--set {override}: the answers are there; what can be set for `score` is"
                    " scoring.…, and name or output.dir to say which run"
                )
        folder = _find_to_read(run, overrides)
        table = score_run(folder, _job_to_score(run, job, folder, overrides), say=_say)
        missing, found = 0, table.to_json()
    _print(json.dumps(found) if as_json else table.to_text())
    if missing and not as_json:
        _print(f"\n{missing:,} rows of the input have no prediction")


@cli.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE", help="Where the page goes."
)
@click.option("--no-images", is_flag=True, help="Leave the thumbnails out of the page.")
@JSON
def report(runs: tuple[str, ...], output: Path | None, no_images: bool, as_json: bool) -> None:
    """Print the table of scores of RUN, and write report.html beside its results.

    The page needs no network: the table, rates, lengths, failures, and every row to look through.
    With several runs, each is set against the first: differences with a 95 % interval, and the rows
    that changed sides; --output writes that as a page, too.
    """
    from batchkit.commands.compare import compare
    from batchkit.commands.report import write_comparison, write_report
    from batchkit.commands.score import is_mixed, table_of

    folders = [_find_to_read(run) for run in runs] or [_find_to_read(None)]
    if len(folders) > 1:
        comparison = compare(folders)
        if output is not None:
            write_comparison(comparison, output)
        _print(json.dumps(comparison.to_json()) if as_json else comparison.to_text())
        return
    table = table_of(folders[0])
    if is_mixed(folders[0]):
        _say(f"{folders[0]}: its rows are scored in more than one way; `batchkit score` fixes that")
    path = write_report(folders[0], output, images=not no_images)
    if as_json:
        _print(json.dumps({**table.to_json(), "path": str(path)}))
    else:
        _print(f"{table.to_text()}\n\n{path}")


@cli.command("find-bs")
@JOB
@click.option("--low", type=click.IntRange(1), default=1, show_default=True, help="Smallest size.")
@click.option(
    "--high", type=click.IntRange(1), default=1024, show_default=True, help="Largest size."
)
@click.option("--rows", type=click.IntRange(1), help="Try with the first N rows only.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Measure each size for at most this long, after at most as long to fill the engine.",
)
@click.option("--write", is_flag=True, help="Set the best size in JOB; all else in it stays.")
@SET
@JSON
def find_bs(
    job: Path,
    low: int,
    high: int,
    rows: int | None,
    seconds: float,
    write: bool,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Find the batch size that suits JOB on this machine, with its own rows and images.

    An engine that batches continuously has no batches. Batch size here is how many requests it runs
    at once (engine.options.max_num_seqs: costs memory of the GPU); where a number at
    run.max_in_flight, the window of requests handed to it, is less than that, it is the window
    (costs memory of the host), and the first lines say so.

    Each size is tried with an engine of its own: doubled from --low on, then narrowed down to the
    largest that fits. Stops where twice the size gains less than 3 %. Exits with 1 if no size fits.
    """
    from batchkit.commands.tuning.find import find_batch_size
    from batchkit.config.loading import load_job

    loaded = load_job(job, overrides)
    found = find_batch_size(
        loaded,
        low=low,
        high=high,
        rows=rows,
        seconds=seconds,
        write_to=job if write else None,
        say=_say,
        tell=(lambda line: None) if as_json else _print,
    )
    _print(json.dumps(found.to_json()) if as_json else found.to_text())
    raise SystemExit(found.exit_code)


@cli.command()
@JOB
@click.option(
    "--batch-sizes",
    default="1,4,16,64",
    show_default=True,
    metavar="N,N,…",
    help="How many requests run at once.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="How often each size is measured, the sizes in turn.",
)
@click.option("--rows", type=click.IntRange(1), help="Measure with the first N rows only.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=20.0,
    show_default=True,
    help="At most this long per round, after at most as long to fill the engine.",
)
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the curve."
)
@SET
@JSON
def bench(
    job: Path,
    batch_sizes: str,
    rounds: int,
    rows: int | None,
    seconds: float,
    html: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure JOB at several batch sizes: throughput, latency, memory.

    Batch size is what it is for find-bs: how many requests run at once. Each figure is the median of
    the rounds, which begin when the engine is warm and full. p50 and p99 are latencies of a request,
    from its entry into the engine's queue. The table ends with one line of JSON.
    """
    from batchkit.commands.tuning.bench import bench as measure
    from batchkit.commands.tuning.bench import sizes_in
    from batchkit.commands.tuning.curve import write_curve
    from batchkit.config.loading import load_job

    if html is not None and not html.resolve().parent.is_dir():
        raise JobError(f"--html {html}: no folder {html.parent}")
    loaded, sizes = load_job(job, overrides), sizes_in(batch_sizes)
    found = measure(loaded, sizes, rounds=rounds, rows=rows, seconds=seconds, say=_say)
    if not as_json:
        _print(found.table.to_text())
    if html is not None:
        write_curve(found, html)
        _say(f"the curve is in {html}")
    _print(json.dumps(found.to_json()))
    raise SystemExit(found.exit_code)


@cli.command()
@JOB
@click.option(
    "--engines",
    required=True,
    metavar="A,B",
    help="Two engine kinds, as vllm,transformers; the same one twice with --set-a or --set-b.",
)
@click.option(
    "--rows",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Only the first N rows (after the job's filter).",
)
@SET
@click.option(
    "--set-a",
    "only_a",
    multiple=True,
    metavar="KEY=VALUE",
    help="As --set, for A alone; a key of the engine: engine.model=PATH. May be repeated.",
)
@click.option("--set-b", "only_b", multiple=True, metavar="KEY=VALUE", help="As --set-a, for B.")
@click.option(
    "--tie",
    type=click.FloatRange(0),
    default=0.01,
    show_default=True,
    help="A difference with a smaller gap is a tie. bfloat16 needs more, as 0.25.",
)
@JSON
def parity(
    job: Path,
    engines: str,
    rows: int,
    overrides: tuple[str, ...],
    only_a: tuple[str, ...],
    only_b: tuple[str, ...],
    tie: float,
    as_json: bool,
) -> None:
    """Put the same rows of JOB through two engines, greedy, and tell where their answers part.

    First A answers, then B; only one model is loaded at a time. The gap of a difference is by how
    much (of a logprob) the surer side preferred its own token to the other's: near 0 it is a tie that
    was broken otherwise, a large one is a real difference. Where an engine gives no logprobs, answers
    are compared by words and the gap is unknown.

    What only one kind of engine knows is left out, and named: options of JOB for the other side,
    parameters of its sampling for both. Nothing is written to the run folder.

    Exits with 0 if all rows are equal or ties, with 3 if some differ, fail on one side alone, or
    none was answered on both.
    """
    from batchkit.commands.parity import parity as compare
    from batchkit.config.loading import load_job
    from batchkit.execution.signals import Interrupted

    loaded = load_job(job, overrides)
    try:
        found = compare(loaded, engines, rows=rows, tie=tie, settings=(only_a, only_b), say=_say)
    except Interrupted as stop:
        _say(f"stopped by {stop}; nothing is kept")
        raise SystemExit(128 + stop.signum) from None
    _print(json.dumps(found.to_json()) if as_json else found.to_text())
    raise SystemExit(found.exit_code)


@cli.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--into", required=True, metavar="RUN", help="The new run folder (or its job file).")
@click.option("--partial", is_flag=True, help="Also where rows are missing.")
@JSON
def merge(runs: tuple[str, ...], into: str, partial: bool, as_json: bool) -> None:
    """Join several runs of one job, as its shards, into one run that is like any other.

    The newest answer of a row counts, and a failure only where no RUN has an answer. Where rows are
    missing nothing is written, unless --partial is given. Runs of different jobs are refused. RUN is
    copied and stays as it is. Exits with 3 if rows are missing or failed.
    """
    from batchkit.commands.merge import merge as join
    from batchkit.commands.run import folder_of

    found = join([_find(run) for run in runs], folder_of(into), partial=partial)
    if as_json:
        _print(json.dumps(found.to_json()))
    else:
        _print(
            f"{len(found.runs)} runs: {found.ok:,} ok, {found.failed:,} failed, {found.missing:,}"
            f" missing of {found.total:,} rows"
        )
        _print(f"answered more than once: {found.double:,} with the same text", nl=False)
        _print(f", {found.conflicting:,} with differing ones (the newest counts)")
        _name_rows("missing", found.missing, found.missing_ids)
        _name_rows("differing", found.conflicting, found.conflicting_ids)
        _print("nothing written" if found.folder is None else found.folder)
    if found.folder is None:
        _say("rows are missing: run what remains, or --partial merges what is there")
    raise SystemExit(found.exit)


@cli.command()
@RUN
@click.option(
    "--repair",
    is_flag=True,
    help="First set aside what is damaged, and rebuild the checkpoint from the log; rows whose"
    " record is gone are run again by the next start.",
)
@JSON
def verify(run: str | None, repair: bool, as_json: bool) -> None:
    """Audit the ledger of RUN: every record is of its row, none twice, checkpoint = log.

    Reads the log and the input. Exits with 1 if it is not sound.
    """
    from batchkit.commands.repair import repair as repair_run
    from batchkit.commands.verify import verify as audit

    folder = _find(run)
    if repair:
        done = repair_run(folder)
        aside = "" if done.aside is None else f", {done.removed:,} lines set aside in {done.aside}"
        _print(f"repaired: {done.kept:,} records kept{aside}", err=True)
        if done.accepted is not None:
            _print(f"accepted as it is: {done.accepted}", err=True)
    found = audit(folder)
    _print(json.dumps(found.to_json()) if as_json else found.to_text())
    raise SystemExit(0 if found.is_sound else 1)


@cli.command()
@click.option("--model", required=True, help="A folder, or a name on the Hugging Face hub.")
@click.option(
    "--prompts", is_flag=True, help="What follows are prompts (the word may be left out)."
)
@click.option(
    "--prompts-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="One prompt a line.",
)
@click.argument("texts", nargs=-1)
@SET
@JSON
def generate(
    model: str,
    prompts: bool,
    prompts_file: Path | None,
    texts: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Answer prompts from the command line: --model M --prompts "a" "b" …

    The run is kept in output/generate, an earlier one beside it. With --json, one record a line.
    """
    from batchkit.commands.run import generate as answer

    try:
        text = prompts_file.read_text(encoding="utf-8-sig") if prompts_file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{prompts_file}: can't be read: {error}") from error
    lines = text.split("\n")  # not splitlines: U+2028 may be part of a prompt
    wanted = [*texts, *(line for line in lines if line.strip())]
    if not wanted:
        raise JobError('no prompt: give --prompts "…" "…" or --prompts-file FILE')
    summary = answer(model, wanted, overrides)
    for record in summary.records():
        if as_json:
            _print(json.dumps(record, ensure_ascii=False))
        else:
            reply = record["text"] if record["error"] is None else f"({record['error']['message']})"
            _print(f"> {wanted[record['index']]}\n{reply}\n")
    _tell(summary, f"batchkit status {summary.folder}")
    raise SystemExit(summary.exit)


@cli.command("demo-model")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--text-only", is_flag=True, help="A Qwen2 without vision, instead of a Qwen3-VL.")
def demo_model(path: Path, text_only: bool) -> None:
    """Build a tiny Qwen3-VL with random weights at PATH. Its answers mean nothing."""
    from batchkit.commands.demo_model import build_demo_model

    build_demo_model(path, text_only=text_only)
    _print(f"{path}: random weights; its answers mean nothing")


@cli.command()
@JSON
def doctor(as_json: bool) -> None:
    """Look at what a run needs on this machine. Exits with 1 and the remedy if something is wrong."""
    from dataclasses import asdict

    from batchkit.commands.doctor import as_text, diagnose

    findings = diagnose()
    if as_json:
        _print(json.dumps([asdict(finding) for finding in findings]))
    else:
        _print(as_text(findings))
    raise SystemExit(0 if all(finding.ok for finding in findings) else 1)


def _find_to_read(run: str | None, overrides: tuple[str, ...] = ()) -> Path:
    """Like ``_find``; reports the first damaged line of the log that will be skipped."""
    from batchkit.storage.ledger import RESULTS
    from batchkit.storage.store import passed_over

    folder = _find(run, overrides)
    if (folder / RESULTS).exists() and (place := passed_over(folder)) is not None:
        _print(
            f"batchkit: {folder / RESULTS}: the line at byte {place} is no record and is passed over;"
            f" its row may be missing below. `batchkit verify --repair {folder}` sets it aside, and"
            " the next run answers the row again",
            err=True,
        )
    return folder


def _find(run: str | None, overrides: tuple[str, ...] = ()) -> Path:
    """The run folder; if it was not named, prints on stderr which one it is."""
    from batchkit.commands.run import find_run

    folder = find_run(run, overrides)
    if run is None:
        _print(f"batchkit: {folder}", err=True)
    return folder


def _job_to_score(
    run: str | None, job: Path | None, folder: Path, overrides: tuple[str, ...]
) -> Any:
    """The run's job, with the scoring of the job file that was named, if any."""
    from batchkit.config.loading import load_job
    from batchkit.storage.manifest import job_of_run

    named = job or _job_file(run)
    if named is None:
        return job_of_run(folder, [o for o in overrides if o.startswith("scoring.")])
    return job_of_run(folder).model_copy(update={"scoring": load_job(named, overrides).scoring})


def _job_of_rows(run: str | None, job: Path | None, overrides: tuple[str, ...]) -> Any:
    """The job whose input has the rows that predictions are for: a job file's, or a run's."""
    from batchkit.config.loading import load_job
    from batchkit.storage.manifest import job_of_run

    named = job or _job_file(run)
    if named is not None:
        return load_job(named, overrides)
    if run is None:
        raise JobError(
            "--predictions needs the job: its rows, and how they are scored; name JOB (or a RUN)"
        )
    return job_of_run(_find(run), overrides)


def _job_file(run: str | None) -> Path | None:
    """``run`` if it is a job file, not a run folder."""
    return Path(run) if run is not None and Path(run).is_file() else None


def _name_rows(what: str, count: int, ids: list[str]) -> None:
    """Print the ids of the first rows that are ``what``, if there are any."""
    if count:
        more = f" and {count - len(ids):,} more" if count > len(ids) else ""
        _print(f"{what}: {', '.join(ids)}{more}")


def _print(text: object, *, err: bool = False, nl: bool = True) -> None:
    """All output goes through here: rows and answers may hold escape sequences, and messages
    secrets."""
    click.echo(plain(masked_text(str(text)) if err else str(text)), err=err, nl=nl)


def _told(error: Exception) -> str:
    """One line for a Python limit that no check covers; the place helps whoever fixes it."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name} line {frame.lineno}, {type(error).__name__}"
    if isinstance(error, MemoryError):
        return f"out of memory ({place}); give the machine more, or the job less at a time"
    return f"something in the job or its files is nested too deeply ({place})"


def _say(text: str) -> None:
    _print(text if text.startswith("|") else f"batchkit: {text}", err=True)


def _run_taken_for_path(wanted: dict[str, str]) -> str | None:
    """``export --parquet RUN`` parses RUN as the file's path, which is never a run folder."""
    for name, path in wanted.items():
        if path and ((Path(path) / "manifest.json").is_file() or path.endswith(".toml")):
            wanted[name] = ""
            return path
    return None


def _show_rows(job: Any, rows: int) -> None:
    from batchkit.commands.validate import preview

    for row in preview(job, rows):
        _print(f"--- row {row.index} (id {row.id})")
        if row.error is not None:
            _print(f"would fail, {row.error}")
            continue
        sizes = ", ".join(f"{width}x{height}" for width, height in row.images)
        tokens = "uncounted" if row.prompt_tokens is None else f"{row.prompt_tokens:,}"
        _print(f"{tokens} prompt tokens, images: {sizes or 'none'}")
        _print(f"sampling: {json.dumps(masked(row.sampling, 'sampling'))}")
        _print(row.prompt)


def _tell(summary: Any, next_command: str) -> None:
    """Print the summary on stderr."""
    _print(
        f"batchkit: {summary.ok:,} ok, {summary.failed:,} failed of {summary.total:,} rows;"
        f" {summary.skipped:,} were done before; {summary.seconds:.1f} s,"
        f" {summary.rows_per_s:.1f} rows/s, {summary.completion_tokens_per_s:,.0f} output tok/s",
        err=True,
    )
    if summary.exit in (130, 143):
        _print("batchkit: interrupted; run the same command to go on", err=True)
    elif summary.exit == 1:
        _print("batchkit: rows without a record remain; next: batchkit run", err=True)
    elif summary.failed:
        _print(f"batchkit: some rows failed; next: {next_command}", err=True)
    _print(f"batchkit: results in {summary.folder}/results.jsonl", err=True)
