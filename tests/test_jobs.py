"""The jobs that ship: each loads and validates, and its prompts ask for what its scorers can read.

RealHiTBench is not part of batchkit: its jobs run here over a data set of the same layout with
tables of our own, and over the real one where it is at hand.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from batchkit.commands.demo_digits import build_demo_digits
from batchkit.commands.score.judge import keys_of_judge
from batchkit.commands.validate import validate
from batchkit.config.loading import load_job
from batchkit.config.tables import JobConfig
from batchkit.errors import MediaError, TemplateError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.rendering.messages import with_note
from batchkit.rendering.renderer import PromptRenderer
from batchkit.rendering.steps import render_or_fail, renderer_of
from batchkit.runs.run import Run
from batchkit.sources import read_rows
from batchkit.types import Completion, Request, Row
from tests.support import command_line
from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.rows import read_jsonl

pytestmark = pytest.mark.vllm

JOBS = Path(__file__).parent.parent / "jobs"
REALHIT = Path(__file__).parents[2] / "shared/realhit"

MODALITIES = {"realhit_image": "image", "realhit_text": "text", "realhit_mix": "mix"}
FORMATS = {"html": "html", "latex": "txt", "markdown": "md", "csv": "csv"}
DRY = ("engine.kind=dry-run", "engine.options={}")

ANALYSES = ["Rudimentary", "Summary", "Predictive", "Exploratory", "Anomaly"]
KINDS = [
    ("Fact Checking", "Value-Matching"),
    ("Numerical Reasoning", "Calculation"),
    ("Structure Comprehending", "Ranking"),  # QA_structure.json names other kinds here
    ("Visualization", "BarChart Generation"),
    *(("Data Analysis", f"{name} Analysis") for name in ANALYSES),
]
ASKED = {  # in the prompt of each kind: the form of its answer, and its closing line
    "Fact Checking": (["Yes or No", "on one line", "commas"], "short value, short value, …"),
    "Numerical Reasoning": (["two places", "on one line", "commas"], "value, value, …"),
    "Structure Comprehending": (
        ["Yes or No", "on one line", "commas", "headers"],
        "short value, short value, …",
    ),
    "Rudimentary Analysis": (["two places", "statistic"], "value, value, …"),
    "Summary Analysis": (["summary", "on one line"], "summary on one line"),
    "Predictive Analysis": (["one name", "phrase for the trend"], "value, name or trend"),
    "Exploratory Analysis": (
        ["below 0.3 no", "0.3 to 0.7", "above 0.7", "Weak negative", "two places"],
        "relation, coefficient",
    ),
    "Anomaly Analysis": (["conclusion", "on one line"], "conclusion on one line"),
}


def text_of(name: str, kind: str) -> str:
    return f"A table in {kind} called {name}: apples 3, pears 4."


def write_tables(root: Path, name: str) -> None:
    for kind, ending in FORMATS.items():
        path = root / kind / f"{name}.{ending}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text_of(name, kind), encoding="utf-8")
    (root / "image").mkdir(exist_ok=True)
    Image.new("RGB", (64, 32)).save(root / "image" / f"{name}.png")


def query(number: int, kind: str, subtype: str, table: str = "fruit-table01") -> dict[str, Any]:
    return {
        "id": number,
        "FileName": table,
        "Question": f"How many {subtype} fruits are there?",
        "QuestionType": kind,
        "SubQType": subtype,
        "FinalAnswer": "" if kind == "Structure Comprehending" else "7",
        "ProcessedAnswer": "[3, 4]",
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data set of one table and its twin, with a question of each kind."""
    root = tmp_path / "dataset"
    (root / "data").mkdir(parents=True)
    for name in ("fruit-table01", "fruit-table01_swap"):
        write_tables(root, name)
    write_queries(root, [query(n, *kind) for n, kind in enumerate(KINDS, start=1)])
    return root


def write_queries(root: Path, queries: list[dict[str, Any]], name: str = "QA_final") -> None:
    text = json.dumps({"queries": queries})
    (root / "data" / f"{name}.json").write_text(text, encoding="utf-8")


def realhit_job(name: str, root: Path, *overrides: str) -> JobConfig:
    output = f"output.dir={root.parent / 'output'}"
    return load_job(JOBS / f"{name}.toml", [*DRY, f"vars.root={root}", output, *overrides])


def prompt_of(renderer: PromptRenderer, row: Row) -> str:
    """The user's text; an image in it reads <image>."""
    messages = renderer.render(row).messages
    assert messages is not None
    content = messages[-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "<image>") for part in content)


def prompts(job: JobConfig) -> dict[str, str]:
    """The prompt of each row, by its kind of task."""
    renderer = PromptRenderer(job)
    return {
        row.fields["SubQType" if "Analysis" in row.fields["SubQType"] else "QuestionType"]: (
            prompt_of(renderer, row)
        )
        for row in read_rows(job.input)
    }


def records_of(job: JobConfig) -> list[dict[str, Any]]:
    return list(ProductionBatchProcessor(job).process().records())


# All jobs


# The judge's input is a run: test_a_judge_reads_the_analyses_of_a_run.
@pytest.mark.parametrize(
    "path",
    sorted({*JOBS.glob("*.toml")} - {JOBS / "realhit_judge.toml"}),
    ids=lambda path: path.stem,
)
def test_every_job_that_ships_validates_and_names_its_run_after_itself(
    path: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.stem == "transcribe":  # its recordings are made by a command
        monkeypatch.chdir(tmp_path)
        build_demo_digits(Path("digits"), count=3, minutes=0.5)
    as_it_ships = load_job(path)
    assert as_it_ships.name == path.stem
    renderer_of(as_it_ships)
    is_realhit = path.stem.startswith("realhit")
    found = validate(load_job(path, [*DRY, *([f"vars.root={root}"] if is_realhit else [])]))
    assert found.rows > 0
    missing = {"media": 1} if path.stem.startswith("reward") else {}  # on purpose
    assert found.failed_by_kind == missing


def run_on_vllm(name: str, cwd: Path) -> list[dict[str, Any]]:
    """The job as it ships, in a folder without batchkit's files; its records in input order."""
    done = batchkit("run", JOBS / f"{name}.toml", cwd=cwd, start=Fork)
    assert done.returncode == 0, done.stderr
    return sorted(read_jsonl(cwd / f"output/{name}/results.jsonl"), key=itemgetter("index"))


def test_reviews_get_vectors_from_vllm(tmp_path: Path) -> None:
    records = run_on_vllm("embed_reviews", tmp_path)
    assert batchkit("export", "--npy", "reviews.npy", cwd=tmp_path).returncode == 0
    vectors = np.load(tmp_path / "reviews.npy")
    ids = json.loads((tmp_path / "reviews.ids.json").read_text())
    assert ids == [record["id"] for record in records]
    assert vectors.shape == (40, records[0]["embedding"]["dimensions"])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert len({vector.tobytes() for vector in vectors}) == 40


def test_passages_get_scores_and_an_order_from_vllm(tmp_path: Path) -> None:
    for record in run_on_vllm("rerank", tmp_path):
        scores, order = record["score"], record["order"]
        assert len(scores) == len(record["fields"]["passages"])
        assert [scores[place] for place in order] == sorted(scores, reverse=True)
        assert record["fields"]["best"] in order


@pytest.mark.release
def test_a_draft_is_judged_and_revised_on_vllm(tmp_path: Path) -> None:
    records = run_on_vllm("draft_judge_revise", tmp_path)
    for record in records:
        draft, judge, revise = (record["steps"][name] for name in ("draft", "judge", "revise"))
        is_revised = not judge["text"].startswith("Yes")
        assert revise.get("skipped", False) != is_revised
        assert record["text"] == (revise if is_revised else draft)["text"]
        assert record["fields"]["column"]
    right_before = sum(record["steps"]["draft"]["scores"]["em"] for record in records)
    right = sum(record["scores"]["em"] for record in records)
    assert 20 <= right_before < right


@pytest.mark.release
def test_most_of_nine_answers_decide_on_vllm(tmp_path: Path) -> None:
    records = run_on_vllm("self_consistency", tmp_path)
    for record in records:
        assert len(record["choices"]) == sum(record["votes"].values()) == 9
        assert record["votes"][record["prediction"]] == max(record["votes"].values())
        assert record["text"] == record["choices"][record["selected"]]["text"]
    answers = [
        choice["text"].strip() == r["fields"]["answer"] for r in records for choice in r["choices"]
    ]
    right = [record["scores"]["em"] for record in records]
    assert len(records) * sum(answers) < len(answers) * sum(right)


@pytest.mark.release
def test_adapters_are_compared_on_vllm(tmp_path: Path) -> None:
    for _ in range(2):
        made = batchkit("demo", "model", "adapters", "--loras", cwd=tmp_path)
    assert "gentle: exists already" in made.stderr
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) < 2 * 100 * 1024
    records = run_on_vllm("compare_adapters", tmp_path)
    right = dict.fromkeys(("", "gentle", "rough"), 0.0)
    for record in records:
        right[record["lora"]] += record["scores"]["em"]
    assert right["rough"] < right["gentle"] <= right[""] == 40
    found = Run(tmp_path / "output/compare_adapters").compare()
    (delta,) = [one for one in found.deltas if "rough" in one.run and one.group is None]
    assert delta.high < 0


# RealHiTBench: the prompts


@pytest.mark.parametrize("name", MODALITIES)
def test_each_kind_of_task_elicits_the_form_that_is_scored(name: str, root: Path) -> None:
    found = prompts(realhit_job(name, root))
    assert found.keys() == {*ASKED, "Visualization"}
    for kind, (words, closing) in ASKED.items():
        for word in words:
            assert word in found[kind], (kind, word)
        assert found[kind].endswith(f"exactly this form:\n[Final Answer]: {closing}")
    assert len(set(found.values())) == len(KINDS)
    for word in ("pandas", "matplotlib", "table.xlsx", "ascending order", "ends with plt.show()"):
        assert word in found["Visualization"]
    assert found["Visualization"].endswith("[Final Answer]:\n```python\n…\n```")
    for prompt in found.values():
        assert [f"\n{n}. " in prompt for n in range(1, 6)] == [True] * 4 + [False]
        assert "total, sum, average or mean" in prompt
        assert prompt.index("# Table\n") < prompt.index("# Question\nHow many ")
        assert "\n\n\n" not in prompt
        assert prompt == prompt.strip()


def test_an_unknown_kind_is_asked_as_a_fact(root: Path) -> None:
    kinds = [("Fact Checking", "x"), ("Poetry", "x"), ("Data Analysis", "x"), ("", "x")]
    write_queries(root, [query(1, *kind) for kind in kinds])
    job = realhit_job("realhit_image", root)
    renderer = PromptRenderer(job)
    assert len({prompt_of(renderer, row) for row in read_rows(job.input)}) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_each_modality_and_format_shows_the_table(format: str, root: Path) -> None:
    label = {"html": "HTML", "latex": "LaTeX", "markdown": "Markdown", "csv": "CSV"}[format]
    text = text_of("fruit-table01", format)
    for name, modality in MODALITIES.items():
        override = [] if modality == "image" else [f"vars.format={format}"]
        for prompt in prompts(realhit_job(name, root, *override)).values():
            assert (text in prompt) == (modality != "image")
            assert (f"in {label} format" in prompt) == (modality != "image")
            assert ("image of a table" in prompt) == (modality == "image")
            assert ("The table is in the image." in prompt) == (modality == "image")
            assert prompt.count("<image>") == (modality != "text")
            assert prompt.startswith("<image>") == (modality != "text")


def test_a_format_that_is_not_there_fails_each_row_by_name(root: Path) -> None:
    found = validate(realhit_job("realhit_text", root, "vars.format=xml"))
    assert found.failed_by_kind == {"template": len(KINDS)}
    assert "xml" in found.problems[0].message


def test_a_missing_table_fails_its_own_row_and_is_named(root: Path) -> None:
    queries = [query(1, *KINDS[0]), query(2, *KINDS[0], table="labor-table68")]
    write_queries(root, queries)
    for name, file in (
        ("realhit_image", "image/labor-table68.png"),
        ("realhit_text", "latex/labor-table68.txt"),
    ):
        records = records_of(realhit_job(name, root))
        assert [record["status"] for record in records] == ["ok", "failed"]
        assert records[1]["error"]["kind"] == "media"
        assert file in records[1]["error"]["message"]


def test_a_table_that_was_cut_says_so(root: Path) -> None:
    job = realhit_job("realhit_text", root)
    renderer = PromptRenderer(job)
    row = next(iter(read_rows(job.input)))
    hint = "a part of it is left out where […] stands"
    assert hint not in prompt_of(renderer, row)
    path = root / "latex" / "fruit-table01.txt"
    path.write_text("begin […] end", encoding="utf-8")
    assert hint in prompt_of(renderer, row)


# RealHiTBench: asking again, scoring


@pytest.mark.parametrize("name", MODALITIES)
def test_charts_are_not_asked_again_and_all_others_are_with_a_note(name: str, root: Path) -> None:
    job = realhit_job(name, root)
    renderer = PromptRenderer(job)
    for row in read_rows(job.input):
        noted = with_note(renderer.render(row))
        assert (noted is None) == (row.fields["QuestionType"] == "Visualization")
        if noted is not None:
            assert noted.messages is not None
            assert "[Final Answer]: followed by the answer itself." in str(noted.messages[-1])


def test_a_run_scores_each_row_by_the_rule_of_its_kind(root: Path) -> None:
    """The engine answers without [Final Answer]: two more tries, then the text counts."""
    job = realhit_job("realhit_text", root)
    summary = ProductionBatchProcessor(job).process()
    assert (summary.ok, summary.retried) == (len(KINDS), 2 * (len(KINDS) - 1))
    overlaps = {"f1", "em", "rouge-l", "sacrebleu"}
    for record in summary.records():
        scores, kind = record["scores"], record["fields"]["QuestionType"]
        subtype = record["fields"]["SubQType"]
        if kind == "Visualization":
            assert scores == {"ecr": None, "pass": None}  # its code may not be run
        elif subtype in ("Summary Analysis", "Anomaly Analysis"):
            assert scores == {}  # a judge scores it
        elif kind == "Structure Comprehending":
            assert scores == dict.fromkeys(overlaps)  # its reference is empty
        else:
            assert scores.keys() == overlaps
            assert scores["em"] == 0


@pytest.mark.parametrize("name", ["realhit_structure", "realhit_text"])
def test_structure_is_scored_against_the_models_own_answer_on_the_other_table(
    name: str, root: Path
) -> None:
    where = "input.where.QuestionType=Structure Comprehending"
    first = realhit_job(name, root, where)
    assert [record["scores"]["em"] for record in records_of(first)] == [None]
    second = realhit_job(
        name, root, where, "vars.swap=_swap", "name=swap", f"scoring.reference_run={first.folder}"
    )
    (row,) = read_rows(second.input)
    if name == "realhit_text":
        assert text_of("fruit-table01_swap", "latex") in prompt_of(PromptRenderer(second), row)
    assert [record["scores"]["em"] for record in records_of(second)] == [1]


def test_twins_may_be_named_by_the_rows_themselves(root: Path) -> None:
    filled = query(1, "Structure Comprehending", "x", table="fruit-table01_swap")
    write_queries(root, [filled], "QA_final_sc_filled")
    for name in MODALITIES:
        job = realhit_job(name, root, "vars.qa=QA_final_sc_filled")
        assert validate(job).ok == 1
    (prompt,) = prompts(realhit_job("realhit_text", root, "vars.qa=QA_final_sc_filled")).values()
    assert text_of("fruit-table01_swap", "latex") in prompt


@pytest.mark.parametrize("name", MODALITIES)
def test_a_judge_reads_the_analyses_of_a_run(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    overrides = [text for of in (*DRY, f"vars.root={root}") for text in ("--set", of)]
    assert (
        command_line.batchkit(
            "run", str(JOBS / f"{name}.toml"), *overrides, "--name", "a"
        ).exit_code
        == 0
    )
    given = {**keys_of_judge(Path("output/a.dry-run")), "output.dir": "output"}
    job = load_job(JOBS / "realhit_judge.toml", [f"vars.root={root}"], given)
    renderer, rows = renderer_of(job), [*read_rows(job.input)]
    assert {row.fields["SubQType"] for row in rows} == {f"{kind} Analysis" for kind in ANALYSES}
    for row in rows:
        text = prompt_of(renderer, row)
        is_free = row.fields["SubQType"] in ("Summary Analysis", "Anomaly Analysis")
        assert (text_of("fruit-table01", "latex") in text) == is_free
        reference, answer = row.fields["FinalAnswer"], row.fields["prediction"].strip()
        assert f"# Reference answer\n{reference}\n\n# Answer to grade\n{answer}\n\n# How" in text
        assert text.endswith("\n[Score]: xx/100")
        assert "\n\n\n" not in text


@pytest.mark.skipif(not REALHIT.exists(), reason="RealHiTBench is not here")
@pytest.mark.parametrize("name", ["realhit_image", "realhit_text", "realhit_mix"])
@pytest.mark.parametrize("qa", ["QA_final", "QA_final_sc_filled", "QA_long"])
def test_the_real_sample_validates(name: str, qa: str, tmp_path: Path) -> None:
    job = realhit_job(name, REALHIT / "sample", f"vars.qa={qa}", f"output.dir={tmp_path}")
    assert validate(job).failed_by_kind == {}


@pytest.mark.skipif(not REALHIT.exists(), reason="RealHiTBench is not here")
@pytest.mark.parametrize(
    ("qa", "rows"),
    [("QA_final", 3071), ("QA_long", 681), ("QA_structure", 396)],
)
def test_every_real_question_renders(qa: str, rows: int, tmp_path: Path) -> None:
    """All tables but the sample's are missing; made up ones show that nothing else fails."""
    path = f"input.path={REALHIT / 'full_qa' / f'{qa}.json'}"
    sampled = realhit_job("realhit_text", REALHIT / "sample", path)
    outcomes = Counter(
        rendered.error.kind if isinstance(rendered, Completion) and rendered.error else "ok"
        for rendered in map(
            partial(render_or_fail, PromptRenderer(sampled)), read_rows(sampled.input)
        )
    )
    assert outcomes.keys() == {"ok", "media"}
    assert outcomes.total() == rows

    made_up = realhit_job("realhit_text", tmp_path, path)
    names = {row.fields["FileName"] for row in read_rows(made_up.input)}
    (tmp_path / "latex").mkdir()
    for name in names:
        path = tmp_path / "latex" / f"{name}.txt"
        path.write_text(text_of(name, "latex"), encoding="utf-8")
    renderer = PromptRenderer(made_up)
    for row in read_rows(made_up.input):
        prompt = prompt_of(renderer, row)
        assert row.fields["Question"].strip() in prompt
        assert "[Final Answer]:" in prompt.rpartition("# Question")[2]


# Reward


def outline(request: Request) -> Iterator[str]:
    """The user's parts, an image as its width."""
    assert request.messages is not None
    for part in request.messages[-1]["content"]:
        yield part["text"] if part["type"] == "text" else f"<{part['image_pil'].width}>"


def edit(**fields: Any) -> Row:
    row = {
        "id": "1",
        "category": "physical",
        "original_description": "A red ball.",
        "edit_instruction": "Let it fall.",
        "original": "narrow.png",
        "edited": "wide.png",
    }
    return Row(0, "1", {**row, **fields})


@pytest.fixture
def pair(tmp_path: Path) -> str:
    """The override for a folder that holds two images."""
    Image.new("RGB", (32, 32)).save(tmp_path / "narrow.png")
    Image.new("RGB", (64, 32)).save(tmp_path / "wide.png")
    return f"vars.root={tmp_path}"


def test_compare_shows_the_original_then_the_edit_then_what_was_asked(pair: str) -> None:
    *shown, text = outline(
        PromptRenderer(load_job(JOBS / "reward_edit.toml", [*DRY, pair])).render(edit())
    )
    assert shown == ["Original image:", "<32>", "Edited image:", "<64>"]
    assert "Description of the original image: A red ball.\n" in text
    assert "Instruction to the editor: Let it fall.\n" in text
    assert text.endswith("Answer with one number from 0.000 to 10.000 and nothing else.")


def test_plain_shows_the_edit_alone(pair: str) -> None:
    request = PromptRenderer(load_job(JOBS / "reward_plain.toml", [*DRY, pair])).render(
        edit(original="gone.png")
    )
    image, text = outline(request)
    assert image == "<64>"
    assert "A red ball." in text
    assert "original is not shown" in text


@pytest.mark.parametrize("name", ["reward_edit", "reward_plain"])
def test_each_category_has_its_own_system_prompt(name: str, pair: str) -> None:
    renderer = PromptRenderer(load_job(JOBS / f"{name}.toml", [*DRY, pair]))
    systems = set()
    for category in ("physical", "environmental", "social", "causal", "referential"):
        messages = renderer.render(edit(category=category)).messages
        assert messages is not None
        assert messages[0]["role"] == "system"
        assert "from 0.000 (nothing is right) to 10.000" in messages[0]["content"]
        systems.add(messages[0]["content"])
    assert len(systems) == 5
    with pytest.raises(TemplateError, match="culinary"):
        renderer.render(edit(category="culinary"))
    with pytest.raises(MediaError, match=r"gone\.png"):
        renderer.render(edit(edited="gone.png"))


def test_reward_runs_on_vllm_past_the_missing_image(demo_model: Path, tmp_path: Path) -> None:
    done = batchkit(
        *("run", JOBS / "reward_edit.toml", "--set", f"engine.model={demo_model}"),
        cwd=tmp_path,
        start=Fork,
    )
    assert done.returncode == 3, done.stderr
    lines = (tmp_path / "output/reward_edit/results.jsonl").read_text().splitlines()
    records = {record["id"]: record for record in map(json.loads, lines)}
    assert len(records) == 10
    failed = records.pop("edit10")
    assert failed["error"]["kind"] == "media"
    assert "edited/referential10.png" in failed["error"]["message"]
    for record in records.values():
        assert record["status"] == "ok"
        assert record["scores"] == {"reward": float(record["text"])}
        assert 0 <= record["scores"]["reward"] <= 10
