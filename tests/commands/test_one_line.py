"""``batchkit run --model … --input …``: a job without a job file."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from batchkit.commands.one_line import run_name
from tests.support.command_line import Ended, batchkit
from tests.support.rows import read_jsonl, write_jsonl

DRY = [
    "--set",
    'engine={kind="dry-run"}',
]  # with engine.kind=dry-run the next run replaces this one
MODEL = ["--model", "org/Small", *DRY]
PROMPT = ["--prompt", "Say {{ text }}"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [{"text": f"word {n}"} for n in range(5)])
    return tmp_path


def run(*args: str, rows: str = "rows.jsonl") -> Ended:
    return batchkit("run", *MODEL, "--input", rows, *args)


@pytest.mark.parametrize(
    ("path", "model", "name"),
    [
        ("rows.jsonl", "org/Small", "rows-Small"),
        ("data/rows.v2.jsonl.gz", "/models/tiny/", "rows.v2-tiny"),
        ("photos/*.jpg", ".demo-model", "photos-demo-model"),
        ("photos/", "m.gguf", "photos-m"),
        ("part-*.csv", "m", "part-m"),
        ("s3://bucket/rows.csv?token=abc", "m", "rows-m"),
        ("my rows (1).csv", "ü", "my-rows-1"),
        ("rows.csv", "", "rows"),
    ],
)
def test_run_is_named_after_input_and_model(path: str, model: str, name: str) -> None:
    assert run_name(path, model) == name


def test_glob_without_a_name_takes_that_of_its_folder(folder: Path) -> None:
    assert run_name("*.csv", "") == run_name(".", "") == folder.name.strip("_")


def test_one_line_runs_exports_and_continues(folder: Path) -> None:
    first = run(*PROMPT, "--limit", "2", "--output", "out/answers.parquet").ok()
    assert f"the run folder is {folder}/output/rows-Small;" in first.stderr
    assert json.loads(first.stdout)["ok"] == 2
    assert pq.read_table("out/answers.parquet").num_rows == 2
    second = run(*PROMPT, "--output", "out/answers.parquet")
    assert (second.json["ok"], second.json["skipped"]) == (5, 2)
    assert "out/answers.parquet: 5 rows" in second.stderr
    assert pq.read_table("out/answers.parquet").num_rows == 5
    assert "prompt" in (folder / "output/rows-Small/job.toml").read_text()


def test_export_has_the_columns_of_an_input_at_an_address(folder: Path) -> None:
    rows = pa.table(
        {"text": ["a", "b"], "n": [1, 2], "image": [{"bytes": b"x", "path": "x.png"}] * 2}
    )
    with fsspec.open("memory://rows/rows.parquet", "wb") as file:
        pq.write_table(rows, file)
    run(*PROMPT, "--output", "answers.csv", rows="memory://rows/rows.parquet").ok()
    answers = pd.read_csv("answers.csv")
    assert answers[["fields.text", "n"]].to_numpy().tolist() == [["a", 1], ["b", 2]]
    assert "image" not in answers


def test_prompt_is_taken_as_it_is(folder: Path) -> None:
    """Unlike a value of --set, which is read as TOML."""
    for prompt in ('"quoted" {{ text }}', "2024", "[1]", "true"):
        result = run("--prompt", prompt, "--limit", "1", "--dry-run")
        assert prompt.replace("{{ text }}", "word 0") in result.stdout


def test_task_embeds_or_classifies_instead(folder: Path) -> None:
    prompt = ("--prompt", "{{ text }}")
    assert run(*prompt, "--task", "embed", "--output", "vectors.parquet").exit_code == 0
    assert len(pq.read_table("vectors.parquet")["embedding"][0].as_py()) == 8
    assert 'task: "embed" → "classify"' in run(*prompt, "--task", "classify").refused()
    assert run(*prompt, "--task", "classify", "--set", "name=classes").json["ok"] == 5


def test_openai_batch_file_needs_no_prompt_and_its_output_is_openais(folder: Path) -> None:
    body = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    write_jsonl(folder / "batch.jsonl", [line])
    assert run("--output", "answers.jsonl", rows="batch.jsonl").exit_code == 0
    (answer,) = read_jsonl(folder / "answers.jsonl")
    assert answer["custom_id"] == "a"
    assert answer["response"]["body"]["choices"]


def test_images_are_looked_up_here_or_beside_an_input_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (8, 6)).save(folder / "a.png")
    write_jsonl(folder / "rows.jsonl", [{"photo": "a.png"}])
    look = ["--prompt", "Look", "--images", "{{ photo }}", "--images", "a.png", "--dry-run"]
    assert "images: 8x6, 8x6" in run(*look).stdout
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert "images: 8x6, 8x6" in run(*look, rows="../rows.jsonl").stdout
    assert "images: 8x6, 8x6" in run(*look, rows=str(folder / "ro*.jsonl")).stdout


def test_flags_also_change_a_job_file(folder: Path) -> None:
    (folder / "job.toml").write_text(
        'name = "trial"\n[input]\npath = "rows.jsonl"\n[prompt]\nuser = "x"\n'
        '[engine]\nkind = "dry-run"\nmodel = "a"\n'
    )
    result = batchkit("run", "job.toml", *PROMPT, "--model", "b", "--output", "a.csv")
    assert result.json["name"] == "trial"
    assert len(read_jsonl(folder / "output/trial/results.jsonl")) == 5
    assert (folder / "a.csv").exists()
    assert 'model = "b"' in (folder / "output/trial/job.toml").read_text()


def test_input_of_the_line_is_the_one_here_and_not_the_one_beside_the_job(folder: Path) -> None:
    (folder / "jobs").mkdir()
    (folder / "jobs/job.toml").write_text(
        '[input]\npath = "rows.jsonl"\n[prompt]\nuser = "{{ text }}"\n[engine]\nkind = "dry-run"\n'
    )
    write_jsonl(folder / "jobs/rows.jsonl", [{"text": "of the job"}])
    for rows in ("rows.jsonl", "ro*.jsonl"):
        shown = batchkit("run", "jobs/job.toml", "--input", rows, "--dry-run").stdout
        assert "word 0" in shown
        assert "of the job" not in shown
    assert "of the job" in batchkit("run", "jobs/job.toml", "--dry-run").stdout


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("a.xlsx", "unknown suffix; use .parquet, .jsonl, .csv"),
        ("answers", "unknown suffix; use "),
        ("rows.jsonl", "is the input"),
        ("output/x.csv/a.csv", "is not a folder; choose another folder"),
        ("folder.csv", "is a folder"),
    ],
)
def test_output_that_cannot_be_written_is_found_before_the_run(
    output: str, words: str, folder: Path
) -> None:
    (folder / "output").mkdir()
    (folder / "folder.csv").mkdir()
    (folder / "output/x.csv").write_text("")
    result = run(*PROMPT, "--output", output).refused()
    assert f"batchkit: error: --output {output}: " in result
    assert words in result
    assert not (folder / "output/rows-Small").exists()
    shards = run(*PROMPT, "--shard", "0/2", "--output", "a.csv").refused()
    assert "each shard would write the same file" in shards


def test_output_without_the_rows_of_another_run_is_refused(folder: Path) -> None:
    assert run(*PROMPT, "--limit", "2", "--set", "name=first").exit_code == 0
    result = run(*PROMPT, "--skip-from", "output/first", "--output", "a.csv").refused()
    assert "the export would lack the rows that output/first has" in result
    assert not (folder / "output/rows-Small").exists()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "rows.csv.gz"])
def test_data_file_in_place_of_a_job_says_what_to_do(name: str, folder: Path) -> None:
    path = folder / name
    if name != "rows.jsonl":
        path.write_bytes(b"PAR1\xff\xfe" if name.endswith((".parquet", ".gz")) else b"a,b\n1,2\n")
    result = batchkit("run", name).refused()
    assert f"--input {name} --prompt" in result
    assert "batchkit init" in result
    (folder / "reviews.toml").write_text("")
    result = batchkit("run", "review.toml")
    assert "review.toml: no such job file; did you mean 'reviews.toml'?" in result.stderr
