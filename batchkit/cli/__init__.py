"""The command line: each command parses its arguments, calls one function, prints, and sets the exit code.

Results go to stdout, progress and errors to stderr. Imports are inside the commands to keep ``--help`` fast.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import batchkit.cli.options as options
from batchkit.cli.frame import Cli, Result, echo, say, say_summary, show
from batchkit.cli.options import (
    COUNT,
    FILE,
    JOB,
    JSON,
    LIMIT,
    MEDIA,
    RUN,
    SET,
    Texts,
    find,
    job_file,
    load,
    of_key,
    printed,
)
from batchkit.cli.rows import show_rows, status, view
from batchkit.cli.serving import serve
from batchkit.cli.tuning import find_bs, plan, tune
from batchkit.errors import JobError, UploadError

if TYPE_CHECKING:
    from batchkit.config.tables import JobConfig
    from batchkit.execution.summary import Outcome

_TEMPLATES: dict[str, Any] = {"metavar": "TEMPLATE", "multiple": True}


@click.group(cls=Cli, context_settings=options.CONTEXT)
@click.version_option(package_name="batchkit-vllm", prog_name="batchkit")
def cli() -> None:
    """Run offline batch inference on vLLM without losing a finished row.

    JOB is a job file in TOML. RUN is a run folder, or the job file that created it; the default is the run under
    output/ that was started last.

    \b
    Exit codes: 0 all rows ok · 1 stopped, can be resumed · 2 bad command line or job file ·
    3 finished, some rows failed · 130 / 143 interrupted by SIGINT / SIGTERM, resumable.
    """


@cli.command()
@click.argument("job", type=click.Path(), required=False)
@of_key("engine.model", "--model", "Model folder, or a name on the Hugging Face hub")
@of_key(
    "input.path",
    "--input",
    "Input file (.jsonl .json .csv .parquet .txt …), glob or URL",
    metavar="PATH",
)
@of_key(
    "prompt.user", "--prompt", "Prompt template of each row: '… {{ column }}'", metavar="TEMPLATE"
)
@of_key("prompt.system", "--system", "System prompt template", metavar="TEMPLATE")
@of_key("task", "--task", "Task of the model: generate (the default), embed, classify, score …")
@of_key("prompt.images", "--images", "Path of an image: '{{ column }}'", **_TEMPLATES)
@of_key("prompt.videos", "--videos", "Path of a video: '{{ column }}'", **_TEMPLATES)
@of_key("prompt.audios", "--audios", "Path of a sound file: '{{ column }}'", **_TEMPLATES)
@of_key(
    "sampling.max_tokens",
    "--max-tokens",
    "Maximum number of tokens of an answer; default 256",
    type=COUNT,
)
@of_key(
    "sampling.temperature",
    "--temperature",
    "Sampling temperature; default 0, which is greedy",
    type=float,
)
@of_key("input.id", "--id", "Column with the id of each row", metavar="COLUMN")
@of_key(
    "output.keep",
    "--keep",
    "Columns of the input that exports include: A,B; default all",
    metavar="COLUMN",
    multiple=True,
    callback=lambda context, option, given: tuple(",".join(given).split(",")) if given else (),
)
@of_key("name", "--name", "Name of the run folder below output/")
@click.option(
    "--output",
    metavar="FILE",
    help="Export to FILE (.parquet, .jsonl, .csv, .npy, .lance or .delta; a path or an address) when all rows are done.",
)
@LIMIT
@click.option(
    "--shard",
    metavar="I/N",
    help="Run only shard I (from 0) of N, in the run folder <name>.shard-I-of-N. auto: take I and N from the"
    " SLURM job array.",
)
@click.option(
    "--join",
    "joins",
    is_flag=True,
    help="Answer rows together with other machines that run the same command; they share output.store.",
)
@of_key(
    "workers.count",
    "--workers",
    "Number of engines on Ray, each with tensor_parallel_size × pipeline_parallel_size GPUs, or auto: as many as Ray"
    " has room for, while nodes join and leave; default one engine without Ray",
    metavar="N|auto",
    callback=lambda context, option, given: (
        given if given in (None, "auto") else COUNT.convert(given, option, context)
    ),
)
@of_key(
    "workers.ray_address",
    "--ray-address",
    "Ray cluster for --workers; default RAY_ADDRESS, or Ray started on this machine",
    metavar="ADDRESS",
)
@options.NOTIFY
@SET
@options.setting(
    "--vary",
    "vary",
    "Run JOB once for each value of a key, and compare the runs: sampling.temperature=0,0.7. May be repeated.",
)
@options.FRESH
@options.ON_CHANGE
@click.option(
    "--skip-from",
    type=FILE,
    metavar="RUN",
    help="Skip rows that are ok in RUN. Rows match by id or, without input.id, by index and fields.",
)
@of_key(
    "run.reuse",
    "--reuse",
    "Copy answers to equal requests from the run in this folder. May be repeated.",
    metavar="RUN",
    multiple=True,
    callback=lambda context, option, given: given or None,
)
@options.TRUST
@click.option(
    "--dry-run", is_flag=True, help="Print the first 3 rows as the engine would get them, and exit."
)
def run(
    job: str | None,
    output: str | None,
    shard: str | None,
    overrides: Texts,
    vary: Texts,
    dry_run: bool,
    trust: bool,
    joins: bool,
    **keys: Any,
) -> None:
    """Run JOB, or resume it where it stopped.

    JOB may be the address of a run in a store (s3://bucket/runs/NAME): it is continued in output/NAME.

    With --vary, or with [[variant]] tables in JOB, each variant is a separate run inside the run folder of JOB. The
    same command resumes them. At the end, the variants are compared with the first one.

    Without JOB, give --model, --input and --prompt. The run folder is then named after input and model, the same
    command resumes the run, and a column `id` names the rows. Rows that contain their own prompt, and OpenAI batch
    files, need no --prompt.

    The last line on stdout is a JSON object with the counts.
    """
    from batchkit.commands.run import run_job
    from batchkit.commands.trust import vouched
    from batchkit.commands.variants import run_variants

    how = {name: keys.pop(name) for name in ("fresh", "on_change", "skip_from")}
    if how["fresh"] and how["on_change"] == "requeue":
        raise click.UsageError(
            "--fresh begins a new run, but --on-change requeue keeps answers of the old run: give only one of them"
        )
    given = options.given_keys(keys)
    file, overrides = options.on_this_machine(job, overrides)
    jobs, is_varied = _jobs_to_run(file, overrides, given, vary, shard)
    if is_varied and (output is not None or shard is not None):
        flag = "--shard" if output is None else "--output"
        raise click.UsageError(
            f"{flag} is for one run, but this job has {len(jobs)} variants: leave {flag} out"
        )
    of = ("rollout",) if dry_run else ("",)
    settings = (*overrides, *(f"{key}={value}" for key, value in given.items()))
    vouch = {"of": of, "trust": trust, "fresh": how["fresh"], "overrides": settings}
    jobs = [vouched(each, say, **vouch) for each in jobs]
    if dry_run:
        for each in jobs:
            _print_rows(each, given.get("input.limit", 3))
        return
    if is_varied:
        raise SystemExit(run_variants(jobs, say=say, ended=_print_end, **how))
    (single,) = jobs
    if job is None:
        ids = f"the column {single.input.id} has the row ids; " * (single.input.id is not None)
        say(f"{ids}the run folder is {single.folder}; the same command resumes the run")
    if joins:
        from batchkit.commands.join import join

        if (joined := join(single, say)) is None:
            return
        outcome = joined
    else:
        outcome = run_job(single, output=output, say=say, **how)
    _print_end(outcome)
    raise SystemExit(outcome.summary.exit)


def _jobs_to_run(
    job: Path | None, overrides: Texts, given: dict[str, Any], vary: Texts, shard: str | None
) -> tuple[list[JobConfig], bool]:
    """Return the jobs of ``batchkit run``, and whether they are variants. Without variants, the list has one job."""
    from batchkit.commands.one_line import one_line_job
    from batchkit.config.loading import check_not_moved, load_job
    from batchkit.config.shard import asked_for
    from batchkit.config.variants import load_variants

    has_engine = "engine.model" in given or any(text.startswith("engine.") for text in overrides)
    if job is not None:
        loaded = load_job(job, overrides, given)
        check_not_moved(job, loaded, overrides)
        if jobs := load_variants(job, loaded.folder, overrides, given, vary):
            return jobs, True
    elif vary:
        raise click.UsageError("--vary changes keys of a job file: give a job file")
    elif "input.path" in given and has_engine:
        loaded = one_line_job(given, overrides)
    else:
        raise click.UsageError(
            "give a job file (`batchkit init` writes one), or --model and --input: batchkit run"
            " --model MODEL --input rows.jsonl --prompt 'Summarize: {{ text }}'"
        )
    return [loaded if shard is None else loaded.of_shard(asked_for(shard, os.environ))], False


def _print_rows(job: JobConfig, rows: int) -> None:
    """Print the first rows as the engine would get them."""
    from batchkit.commands.validate import not_checked, preview

    for text in preview(job, rows):
        echo(text)
    for line in not_checked(job):
        say(line)


def _print_end(outcome: Outcome) -> None:
    """Print the counts of a run, and raise its error if it has one. If the run could not begin (exit code 2), print no
    counts."""
    if outcome.error is None:
        say_summary(outcome.summary)
    if outcome.error is None or outcome.error.exit_code == 1:
        echo(json.dumps(outcome.summary.to_json()))
    if outcome.error is not None:
        raise outcome.error


@cli.command()
@click.argument("kind", required=False)
@click.argument("file", type=FILE, required=False)
@click.option("--list", "as_list", is_flag=True, help="List the kinds of job files.")
@click.option(
    "--schema",
    is_flag=True,
    help="Print the JSON Schema of job files, with which editors check them.",
)
@printed
def init(kind: str | None, file: Path | None, as_list: bool, schema: bool) -> Result:
    """Write a commented job file to start from.

    KIND is text, images, pdf, json, embed, classify, rerank, openai, judge or steps. Without KIND, `init` prints what
    each kind is for. The default of FILE is KIND.toml.
    """
    from batchkit.commands.init import Schema, kinds
    from batchkit.commands.init import init as write

    if schema:
        return Schema()
    return kinds() if as_list or kind is None else write(kind, file)


@cli.command()
@JOB
@options.rows("Check only the first N rows; default all.")
@SET
@printed
def validate(job: Path, rows: int | None, overrides: Texts) -> Result:
    """Check every row of JOB without loading the model.

    Checks the templates, media, prompt length and id of each row, and writes nothing. Exits with 3 if a row would
    fail.
    """
    from batchkit.commands.validate import validate as check

    return check(load(job, overrides, of=("rollout",)), rows)


@cli.command("retry-failed")
@RUN
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    help="Retry only failures of this kind (template, media, prompt_too_long …). May be repeated.",
)
@options.NOTIFY
@options.TRUST
@SET
@printed
def retry_failed(
    run: str | None, kinds: Texts, trust: bool, overrides: Texts, **keys: Any
) -> Result:
    """Retry the rows of RUN that failed or have an empty answer.

    Appends the new records; rows that are ok stay as they are. --set applies to this retry only. If RUN is a job
    file, secrets are read from it. Exits with 1 if some rows of RUN have no record yet.
    """
    from batchkit.commands.retry import retry_failed as again
    from batchkit.types import ERROR_KINDS

    for kind in kinds:
        if kind not in ERROR_KINDS:
            raise JobError(f"--kind {kind}: known kinds are {', '.join(ERROR_KINDS)}")
    for key, command in options.given_keys(keys).items():  # of --notify
        overrides += (f"{key}={json.dumps(command, ensure_ascii=False)}",)
    folder = find(run, changes=True)
    found = again(
        folder, kinds=kinds, overrides=overrides, job_file=job_file(run), trust=trust, say=say
    )
    if found.summary is not None:
        say_summary(found.summary, was_retry=True)
    return found


@cli.command(cls=options.Export)
@click.argument("targets", nargs=-1, metavar="[RUN] [FILE]...")
@click.option(
    "--as",
    "as_format",
    metavar="FORMAT",
    help="Format of FILE, or of a file in the run folder without FILE; default by the suffix of FILE.",
)
@options.export_format("--parquet", "Write Parquet, compressed with zstd.")
@options.export_format("--jsonl", "Write the records as JSON lines.")
@options.export_format("--csv", "Write CSV with the columns of --parquet.")
@click.option(
    "--safe-csv",
    is_flag=True,
    help="Write CSV for spreadsheets: put ' before texts that a spreadsheet would run as a formula.",
)
@options.export_format(
    "--npy",
    "Write the vectors of an embed run as one numpy matrix, and the row ids as .ids.json.",
)
@options.export_format("--lance", "Write a Lance dataset, which is a folder.")
@options.export_format("--delta", "Write a Delta table, which is a folder.")
@options.export_format("--openai", "Write OpenAI batch output files.")
@options.export_format("--srt", "Write subtitles, ID.srt for each recording, into a folder.")
@options.export_format("--vtt", "Write WebVTT subtitles, ID.vtt for each recording, into a folder.")
@click.option(
    "--only-finished", is_flag=True, help="Refuse to export a run in which rows have no record."
)
@click.option("--force", is_flag=True, help="Also replace a file that batchkit did not write.")
@click.option(
    "--without-input",
    is_flag=True,
    help="Leave out the input's columns if the input was moved or changed.",
)
@JSON
def export(
    targets: Texts,
    as_format: str | None,
    safe_csv: bool,
    only_finished: bool,
    force: bool,
    without_input: bool,
    as_json: bool,
    **formats: str | None,
) -> None:
    """Export the newest record of each row of RUN.

    FILE is a path or an address (s3://bucket/a.parquet, gs://…, hf://datasets/OWNER/NAME); its suffix names the format:
    .parquet, .jsonl, .csv, .npy, .lance or .delta. The options below name a format, too; without PATH, they write into
    the run folder. Rows are in input order, and have their newest scores. Exits with 1 if a file could not be sent.
    """
    from batchkit.commands.export import export as write
    from batchkit.config.export_target import Target, check_format, target_of
    from batchkit.config.seams import EXPORTS

    def refuse(text: str) -> NoReturn:
        raise JobError(f"{text}; restore the input, or give --without-input")

    named = {name: path for name, path in formats.items() if path is not None}
    if safe_csv:
        named["safe-csv"] = named.pop("csv", "")
    run, files = _run_and_files(targets, named)
    if as_format is None:
        _check_order(files, named)
    wanted = [target_of(file, as_format, key="FILE") for file in files]
    if as_format is not None and not files:
        check_format(as_format, "--as")
        wanted.append(Target(as_format))
    wanted += [Target(name, path or None) for name, path in named.items()]
    if not wanted:
        raise JobError(
            f"give a FILE, or name a format: {', '.join(f'--{name}' for name in EXPORTS.names())}"
        )
    folder, lacks = find(run), say if without_input else refuse
    unsent = list[UploadError]()
    for target in wanted:
        how = {"only_finished": only_finished, "force": force}
        try:
            for file in write(folder, target, say, lacks=lacks, **how):
                show(file, as_json)
        except UploadError as error:
            unsent.append(error)
    for one in unsent[1:]:
        say(f"error: {one}")
    if unsent:
        raise unsent[0]


@cli.command()
@RUN
@click.option(
    "--predictions",
    type=FILE,
    metavar="FILE",
    help="Score the predictions in FILE: JSONL, CSV, Parquet, OpenAI's batch output, or another tool's results in JSON.",
)
@click.option(
    "--job", type=FILE, metavar="JOB", help="Job file whose input and [scoring] are used."
)
@click.option(
    "--judge",
    type=FILE,
    metavar="JOB",
    help="Run this job on the answers of RUN, in the folder RUN/NAME, and add its scores to RUN. --set, --fresh"
    " and --on-change apply to this job.",
)
@options.FRESH
@options.ON_CHANGE
@options.TRUST
@SET
@printed
def score(
    run: str | None,
    predictions: Path | None,
    job: Path | None,
    judge: Path | None,
    trust: bool,
    overrides: Texts,
    **how: Any,
) -> Result:
    """Score the answers of RUN again, without the model.

    Uses the [scoring] of --job, or of RUN if RUN is a job file; else the scoring that the run was started with.
    Scores are percentages; rewards range from 0 to 10. Failed rows are not scored, and unscored rows do not count as 0.
    Exits with 3 if --judge gave no score.
    """
    from batchkit.commands.score import check_overrides, job_of_rows, job_to_score, score_run
    from batchkit.commands.score.judge import judge_run, keys_of_judge
    from batchkit.commands.score.predictions import score_predictions
    from batchkit.runs.compare import RunScores

    named = job or job_file(run)
    if judge is not None:
        if job is not None or predictions is not None:
            raise click.UsageError(
                "--judge scores the answers of a RUN; leave --job and --predictions out"
            )
        of = find(run, changes=True)
        judging = load(judge, overrides, keys_of_judge(of), of=("",), trust=trust)
        return judge_run(of, judging, say=say, **how)
    if trust or how != {"fresh": False, "on_change": "fail"}:
        raise click.UsageError("--fresh, --on-change and --trust are for --judge")
    if predictions is not None:
        folder = None if named or run is None else find(run)
        return score_predictions(job_of_rows(named, folder, overrides), predictions, say)
    check_overrides(overrides)
    of = find(run, overrides, changes=True)
    return RunScores.of(score_run(of, job_to_score(of, named, overrides), say=say), of)


@cli.command()
@RUN
@click.option(
    "--output",
    type=FILE,
    metavar="FILE",
    help="Path of the page; default report.html in the run folder.",
)
@click.option("--no-images", is_flag=True, help="Leave thumbnails out of the page.")
@MEDIA
@printed
def report(
    run: str | None, output: Path | None, no_images: bool, media: tuple[Path, ...]
) -> Result:
    """Write RUN as one web page, and print its scores.

    The page works without a network: it holds the score table, rates, lengths, failures and the rows.
    """
    from batchkit.commands.report import report as write

    return write(find(run), output, images=not no_images, media=media, say=say)


@cli.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--tie",
    type=click.FloatRange(0),
    metavar="GAP",
    help="Gap in log-probability below which a different token is a tie. The default fits float32; bfloat16 needs more,"
    " for example 0.25.",
)
@click.option(
    "--output", type=FILE, metavar="FILE", help="Also write the comparison as a web page."
)
@click.option(
    "--self",
    "is_self",
    is_flag=True,
    help="Compare RUN with itself: compute some of its rows again, each alone. If answers differ, try settings of the"
    " engine that may cure this.",
)
@options.TRUST
@SET
@printed
def compare(
    runs: Texts,
    tie: float | None,
    output: Path | None,
    is_self: bool,
    trust: bool,
    overrides: Texts,
) -> Result:
    """Compare runs of the same rows with the first one.

    Prints the differences of scores by group with a 95 % interval, the rows that became better or worse, the first
    token at which answers differ, and the rate, tokens and price of each run. RUN may be the folder of a job's variants,
    which names all of them, or one run with input.cross, whose values are compared. With --self, exits with 1 if an
    answer differs.
    """
    if is_self:
        from batchkit.commands.self_check import check_again

        if len(runs) != 1 or tie is not None or output is not None:
            raise click.UsageError("--self takes one RUN, without --tie and --output")
        file = options.job_file(runs[0])
        return check_again(find(runs[0]), job_file=file, overrides=overrides, trust=trust, say=say)
    if trust or overrides:
        raise click.UsageError("--trust and --set need --self")
    from batchkit.commands.report import write_comparison
    from batchkit.runs.compare import TIE
    from batchkit.runs.compare import compare as compare_runs
    from batchkit.runs.listing import find_variants

    folders = [folder for run in runs for folder in find_variants(run) or [find(run)]]
    comparison = compare_runs(folders, tie=TIE if tie is None else tie)
    if output is not None:
        write_comparison(comparison, output)
    return comparison


@cli.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--into", required=True, metavar="RUN", help="New run folder (or its job file).")
@click.option("--partial", is_flag=True, help="Merge even if rows are missing.")
@printed
def merge(runs: Texts, into: str, partial: bool) -> Result:
    """Merge the shards or parts of a job into one run.

    The newest answer of a row wins; a failure is kept only if no RUN has an answer. Without --partial, nothing is
    written if rows are missing. Runs of different jobs are refused. RUN is copied and does not change. Exits with 3 if
    rows are missing or failed.
    """
    from batchkit.commands.merge import merge as join
    from batchkit.runs.listing import folder_of

    found = join([find(run) for run in runs], folder_of(into), partial=partial)
    if found.folder is None:
        say("rows are missing: run them, or merge without them (--partial)")
    return found


@cli.command()
@RUN
@click.option(
    "--repair",
    is_flag=True,
    help="First set damaged lines aside and rebuild the checkpoint from the log. The next `run` repeats the rows"
    " whose record is missing.",
)
@MEDIA
@printed
def verify(run: str | None, repair: bool, media: tuple[Path, ...]) -> Result:
    """Check the log of RUN against its checkpoint and input.

    Reads the log and the input. Each record must belong to the row at its index, and no row may have two answers.
    Exits with 1 if a check fails.
    """
    from batchkit.execution.repair import repair as repair_run
    from batchkit.runs.verify import verify as audit

    folder = find(run, changes=repair)
    if repair:
        echo(repair_run(folder, media), err=True)
    return audit(folder, media)


@cli.group()
def demo() -> None:
    """Write example data, or a tiny model, to try batchkit with."""


@demo.command("model")
@click.argument("path", type=FILE)
@click.option(
    "--text-only", is_flag=True, help="Build a Qwen2 without vision instead of a Qwen3-VL."
)
@click.option(
    "--loras", is_flag=True, help="Build two LoRA adapters for batchkit-demo instead of a model."
)
def demo_model(path: Path, text_only: bool, loras: bool) -> None:
    """Build a tiny Qwen3-VL with random weights at PATH.

    Its answers mean nothing.
    """
    from batchkit.commands.demo_loras import LORAS, build_demo_loras
    from batchkit.commands.demo_model import build_demo_model

    if loras:
        build_demo_loras(path)
        echo(f"{path}: two adapters with random weights: {', '.join(LORAS)}")
        return
    build_demo_model(path, text_only=text_only)
    echo(f"{path}: random weights; its answers mean nothing")


@demo.command("tables")
@click.argument("folder", type=FILE)
@click.option(
    "--count", default=40, type=click.IntRange(1), show_default=True, help="Number of pictures."
)
@click.option("--seed", default=0, show_default=True, help="Random seed of the tables.")
def demo_tables(folder: Path, count: int, seed: int) -> None:
    """Draw tables for batchkit-demo, with questions and answers.

    FOLDER/questions.jsonl has one row per picture: id, image, question, answer and kind.
    """
    from batchkit.commands.demo_tables import build_demo_tables

    build_demo_tables(folder, count=count, seed=seed)
    rows = folder / "questions.jsonl"
    echo(f"{rows}: a question about each of {count} pictures; to ask them:")
    echo(
        f"batchkit run --model batchkit-demo --input {rows} --set media.root={folder}"
        """ --images "{{ image }}" --prompt "{{ question }}" --output answers.csv"""
    )


@demo.command("digits")
@click.argument("folder", type=FILE)
@click.option(
    "--count", default=40, type=click.IntRange(1), show_default=True, help="Number of recordings."
)
@click.option(
    "--minutes",
    default=10.0,
    type=click.FloatRange(0, 120),
    show_default=True,
    help="Length in minutes of one further, long recording; 0 for none.",
)
@click.option("--seed", default=0, show_default=True, help="Random seed of the recordings.")
def demo_digits(folder: Path, count: int, minutes: float, seed: int) -> None:
    """Write recordings of digits for batchkit-demo-speech.

    Each digit is a pair of telephone tones. FOLDER/recordings.jsonl has one row per recording: id, recording, text
    and times.
    """
    from batchkit.commands.demo_digits import build_demo_digits

    build_demo_digits(folder, count=count, minutes=minutes, seed=seed)
    echo(f"{folder / 'recordings.jsonl'}: recordings of digits, with their texts and times")


@cli.command()
@printed
def doctor() -> Result:
    """Check packages, GPUs and memory of this machine.

    Exits with 1 if something that a run needs is missing.
    """
    from batchkit.commands.doctor import diagnose

    return diagnose(say=say)


for command in (status, show_rows, view, serve, plan, tune, find_bs):
    cli.add_command(command)


def _check_order(files: list[str], named: dict[str, str]) -> None:
    """Raise JobError for ``export RUN PATH --srt`` instead of ``export RUN --srt PATH``."""
    from batchkit.config.export_target import SUFFIXES

    without_path = [name for name, path in named.items() if not path]
    for file in files if without_path else ():
        if "://" not in file and Path(file).suffix.lower() not in SUFFIXES:
            raise JobError(
                f"FILE {file}: unknown suffix; write the path after the format: --{without_path[0]} {file}"
            )


def _run_and_files(targets: Texts, named: dict[str, str]) -> tuple[str | None, list[str]]:
    """Return the run and the files in ``targets``. In ``export --parquet RUN``, click takes RUN as the PATH of
    ``--parquet``; such a path in ``named`` is returned as the run."""
    from batchkit.config.export_target import SUFFIXES
    from batchkit.storage.store.objects import is_store

    first, *rest = targets or ("",)
    is_log = Path(first).name == "results.jsonl"  # returned as the run, which `find` then refuses
    may_be_run = bool(first) and ("://" not in first or is_store(first))
    if may_be_run and (is_log or Path(first).suffix.lower() not in SUFFIXES):
        return first, rest
    for name, path in named.items():
        if path and ((Path(path) / "manifest.json").is_file() or path.endswith(".toml")):
            named[name] = ""
            return path, [*targets]
    return None, [*targets]
