"""Mistakes in options, names and the job file. tests/test_mistakes.py has more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import batchkit
from tests.support.mistakes import JOB, ONE_LINE, Mistake, check, params, write_example

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

STEPS = (
    JOB.replace('[prompt]\nuser = "Mood? {{ review }}"\n', "")
    + """\
[[steps]]
name = "a"
prompt.user = "{{ review }}"
answer = false
[[steps]]
name = "b"
prompt.user = "{{ review }}"
"""
)

COMMANDS = [
    # A run folder that was moved is continued where it is, never begun again where it was.
    Mistake(
        "run moved/mv/job.toml",
        ("moved/mv/job.toml: this run folder was moved here from …/output/mood", "--set name=mv"),
        files={"moved/mv/job.toml": JOB, "moved/mv/manifest.json": "{}"},
    ),
    Mistake("run job.toml\nrun output/mood", "for a run folder: output/mood/job.toml"),
    Mistake("run job.toml\nrun output/mood/job.toml", '"skipped": 3', 0),
    # An option that counts once is given once.
    Mistake(
        f"{ONE_LINE} --input more.csv --prompt A",
        ("--input is given twice, but may be given only once", "a quoted glob reads several files"),
    ),
    *(
        Mistake(command, f"{flag} is given twice, but may be given only once: keep one")
        for command, flag in (
            (f"{ONE_LINE} --prompt A --prompt 'Mood? {{{{ review }}}}'", "--prompt"),
            ("show output/mood -n 3 -n 4", "-n"),
            ("export output/mood --csv a.csv --csv b.csv", "--csv"),
            ("find-bs job.toml --low 1 --low=2", "--low"),
        )
    ),
    # A suffix and a format that contradict each other.
    *(
        Mistake(f"run job.toml\nexport output/mood {given}", said)
        for given, said in {
            "answers --csv": "FILE answers: unknown suffix; write the path after the format: --csv answers",
            "--csv ans.parquet": "ans.parquet: --csv writes .csv files; give a file name with this suffix, or give --parquet",
            "--jsonl ans.json": "ans.json: --jsonl writes .jsonl files; give a file name with this suffix",
            "--csv ans.csv.gz": "ans.csv.gz: --csv writes .csv files; give a file name with this suffix",
            "--parquet ans.xlsx": "ans.xlsx: --parquet writes .parquet files; give a file name with this suffix",
        }.items()
    ),
    # A template for max_tokens is no secret, so the job in the run folder can be run.
    Mistake(
        "run job.toml --set 'sampling.max_tokens={{ stars }}'\nrun output/mood/job.toml",
        '"skipped": 3',
        0,
    ),
    # An address that can't be written is known before the run.
    *(
        Mistake(f"run job.toml {given}", words, never="ok, 0 failed")
        for given, words in (
            ("--output nosuch://b/a.csv", "--output: nosuch://b/a.csv: can't be written to"),
            ("--output https://b/a.csv", "--output https://b/a.csv: can't be written to"),
            ("--set 'output.export=[\"nosuch://b/a.csv\"]'", "nosuch://b/a.csv: can't be written"),
            ("--set 'output.export=[\"a.xlsx\"]'", "a.xlsx: unknown suffix; use .parquet"),
            ("--set 'output.export=[\"parqet\"]'", "did you mean 'parquet'?"),
        )
    ),
    Mistake("run job.toml\nexport output --csv", ("output: neither a", "'output/mood'")),
    Mistake(
        "validate job.toml --set engine.kind=vllm --set engine.model=batchkit-demo --set engine.lora=gone",
        "engine.lora: gone: no such folder, and not a name on the hub, which has the form owner/name",
        is_slow=True,
    ),
    Mistake(
        "validate job.toml --set scoring.reference=label --set 'scoring.scorers=[\"accuracy\"]'",
        ('found "accuracy"', "did you mean 'em'?"),
    ),
    Mistake(
        "validate steps.toml --set 'steps.b.when=stars == 5'",
        "steps.b: when: 'stars == 5' is the same text for all rows; write {{ stars == 5 }} to compute it for each row",
        files={"steps.toml": STEPS},
    ),
]

NAMES = [
    *(
        Mistake(f"validate job.toml --set {key}=1", said)
        for key, said in {
            "model_name": "model_name: unknown key; did you mean 'engine.model'?",
            "input_file": "input_file: unknown key; did you mean 'input.path'?",
            "system_prompt": "system_prompt: unknown key; did you mean 'prompt.system'?",
            "batch_size": "did you mean 'engine.options.max_num_seqs'?",
            "max_model_len": "did you mean 'engine.options.max_model_len'?",
            "prompt.messages": "prompt.messages: unknown key; did you mean 'user'?",
            "output.path": "output.path: unknown key; did you mean 'export'?",
            "output.format": "output.format: unknown key; did you mean 'export'?",
            "prompt.name": "did you mean 'name', at the top of the file, above the first [table]?",
            "sampling.name": "sampling.name: belongs at the top of the file, above the first [table]",
            "sampling.task": "sampling.task: belongs at the top of the file, above the first [table]",
            "sampling.max_seq_len": "no such parameter; did you mean 'engine.options.max_model_len'?",
        }.items()
    ),
    *(
        Mistake(command, f"Did you mean '{here}'?")
        for command, here in {
            "run job.toml -n 5": "--limit",
            "run job.toml --gpus 2": "--set engine.options.tensor_parallel_size=…",
            "run job.toml --tensor-parallel-size 2": "--set engine.options.tensor_parallel_size=…",
            "run job.toml --output-dir x": "--set output.dir=…",
            "run --model_name m": "--model",
            "run job.toml -o a.csv": "--output",
            "run job.toml --temp 1": "--temperature",
            "export output/mood --format csv": "--csv",
            "run --system-prompt m": "--system",
            "run job.toml --top-p 1": "--set sampling.top_p=…",
            "retry output/mood": "batchkit retry-failed",
            "evaluate output/mood": "batchkit score",
        }.items()
    ),
    Mistake(
        "start job.toml", "Did you mean 'batchkit run', which also resumes an interrupted run?"
    ),
]

VALUES = [
    Mistake(f"run job.toml\n{command}", said, files={"old.xls": "x"})
    for command, said in {
        "run job.toml --set output.keep=label": '; write ["label"]',
        "run job.toml --set scoring.choices=a": 'expected list of text; write ["a"]',
        "run job.toml --set sampling=0": "set one of its keys, for example sampling.temperature",
        "run job.toml --set budget.max_seconds=1h": "expected number > 0; write the number of seconds",
        "run job.toml --set input.path=old.xls": "is a workbook of Excel before 2007; save it as .xlsx",
        "run job.toml --fresh --on-change requeue": "keeps answers of the old run: give only one of them",
        "merge output/mood": "--into is missing: batchkit merge output/a output/b --into output/ab",
        "export output/mood/results.jsonl --csv": "a file of a run; name the run's folder: output/mood",
        "run job.toml --fresh --set 'prompt.user={{ row.Review }}'": "did you mean 'review'?",
    }.items()
]
TABLES = {"commands": COMMANDS, "names": NAMES, "values": VALUES}


@pytest.mark.parametrize("mistake", params(TABLES))
def test_a_mistake_is_named_with_what_to_do(mistake: Mistake) -> None:
    check(mistake)


def test_a_moved_run_is_continued_where_it_is() -> None:
    folder = Path.cwd()
    write_example(folder)
    batchkit("run", "job.toml")
    (folder / "output/mood").rename(folder / "output/archive")
    refused = batchkit("run", "output/archive/job.toml")
    *_, place, _, name = refused.stderr.split()
    assert (refused.exit_code, name) == (2, "name=archive")
    again = batchkit("run", "output/archive/job.toml", "--set", place, "--set", name)
    assert (again.exit_code, again.json["skipped"]) == (0, 3)
    assert not (folder / "output/mood").exists()
