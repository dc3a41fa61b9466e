"""Prompts that are too long for the model, on real vLLM: cut in the middle, or failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchkit import ProductionBatchProcessor
from batchkit.commands.validate import validate
from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.engines.registry import open_preflight
from batchkit.errors import PromptTooLongError
from batchkit.rendering.truncation import MARK
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.types import Cut, Request, Row
from tests.support.rows import write_jsonl
from tests.support.small_vllm import SMALL

pytestmark = pytest.mark.vllm

LIMIT: int = SMALL["max_model_len"]
MAX_TOKENS = 16
# ``pad`` makes the instructions themselves long: they stand in no field, and are never cut.
USER = "Read this: {{ text }}\n{{ ' tea' * pad }}Answer {{ id }} in one word."
SYSTEM = "You are brief."


def _tea(n: int) -> str:
    return f"FIRST{' tea' * n} LAST"


def _mixed(n: int) -> str:
    return "".join(f"日本 line {k}: {'x' * (k % 11)} 🍵é\n" for k in range(n))


TEXTS = {
    "short": _tea(20),
    "by little": _tea(470),
    "very long": _tea(40_000),
    "of many bytes": f"FIRST{_mixed(400)}LAST",
    "blank middle": f"FIRST one two three{' ' * 5000}{_tea(1000)} LAST",
    "no spaces": f"FIRST{'abcdefghij' * 900}LAST",
}
ROWS = [
    *({"id": name, "text": text, "pad": 0} for name, text in TEXTS.items()),
    {"id": "instructions", "text": _tea(30), "pad": 700},
    {"id": "both", "text": _tea(700), "pad": 300},
]
FAIL = [row["id"] for row in ROWS if row["id"] != "short"]


class Run:
    """A finished run: its folder, and its records by id."""

    def __init__(self, job: JobConfig) -> None:
        self.summary = ProductionBatchProcessor(job, quiet=True).process()
        self.folder = job.folder
        self.records = {record["id"]: record for record in read_newest(self.folder / RESULTS)}


def job_of(model: Path, folder: Path, rows: list[dict[str, Any]], **tables: Any) -> JobConfig:
    table: dict[str, Any] = {
        "name": "cut",
        "input": {"path": str(write_jsonl(folder / "rows.jsonl", rows)), "id": "id"},
        "engine": {"model": str(model), "options": SMALL, "in_process": True},
        "sampling": {"max_tokens": MAX_TOKENS},
        "media": {"root": str(folder)},
        "run": {"check_rows": 0},
        "output": {"dir": str(folder / "output"), "prompt": True, "keep": ["text"]},
        "retry": {"on_too_long": "truncate-middle"},
    }
    return make_job(table | tables, "test")


@pytest.fixture(scope="module")
def cut(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("cut")
    return Run(job_of(demo_model, folder, ROWS, prompt={"system": SYSTEM, "user": USER}))


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model)


def chat_text(tokenizer: Any, row: dict[str, Any]) -> str:
    pad = " tea" * row["pad"]
    user = f"Read this: {row['text']}\n{pad}Answer {row['id']} in one word."
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    return as_text(tokenizer, messages)


def as_text(tokenizer: Any, messages: list[Any]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_every_row_but_the_impossible_one_is_answered(cut: Run, tokenizer: Any) -> None:
    failed = {name for name, record in cut.records.items() if record["status"] == "failed"}
    assert failed == {"instructions"}
    assert (cut.summary.ok, cut.summary.failed) == (len(ROWS) - 1, 1)
    assert cut.records["instructions"]["error"]["kind"] == "prompt_too_long"
    assert "truncated_tokens" not in cut.records["instructions"]
    short = cut.records["short"]
    assert "truncated_tokens" not in short
    assert short["prompt"] == chat_text(tokenizer, ROWS[0])
    assert short["attempt"] == 1


@pytest.mark.parametrize("name", [name for name in FAIL if name != "instructions"])
def test_long_text_is_cut_in_the_middle_and_the_record_says_by_how_much(
    cut: Run, tokenizer: Any, name: str
) -> None:
    row = next(row for row in ROWS if row["id"] == name)
    record = cut.records[name]
    uncut = chat_text(tokenizer, row)
    assert count(tokenizer, uncut) >= LIMIT, "the row tests what it says"
    usage = record["usage"]
    assert record["truncated_tokens"] == count(tokenizer, uncut) - usage["prompt_tokens"]
    assert usage["prompt_tokens"] == count(tokenizer, record["prompt"])
    assert usage["prompt_tokens"] + MAX_TOKENS <= LIMIT
    if name in ("by little", "very long"):
        assert usage["prompt_tokens"] >= 0.85 * LIMIT, "no more is cut than need be"
    assert record["finish_reason"] in ("stop", "length")
    assert record["text"]
    assert record["attempt"] == 1, "no try was lost"
    # The template still stands round the text, and the text's own ends are there.
    before, _, after = uncut.partition(row["text"])
    assert record["prompt"].startswith(before + "FIRST")
    assert record["prompt"].endswith("LAST" + after)
    head, mark, tail = record["prompt"].partition(MARK)
    assert mark
    head, tail = head.removeprefix(before), tail.removesuffix(after)
    assert row["text"].startswith(head)
    assert row["text"].endswith(tail)
    assert record["fields"]["text"] == row["text"], "the record keeps the row as it came"


@pytest.mark.parametrize("max_tokens", [1, 16, 300, None])
def test_cut_prompt_is_refused_until_its_answer_fits(
    demo_model: Path, tmp_path: Path, max_tokens: int | None
) -> None:
    """What is left after a cut is an estimate; the engine counts, by the same rule."""
    preflight = open_preflight(job_of(demo_model, tmp_path, []))
    room = max(1, min(max_tokens or 0, LIMIT // 2))

    def plain(tokens: int, cut: Cut | None) -> Request:
        sampling = {"max_tokens": max_tokens}
        return Request(Row(0, "0", {}), None, " tea" * tokens, sampling, "", cut=cut)

    cut = Cut(1000, 9000, room)
    assert preflight.render(plain(LIMIT - 1, None)).prompt_tokens == LIMIT - 1
    assert preflight.render(plain(LIMIT - room, cut)).prompt_tokens == LIMIT - room
    for tokens, its_cut in ((LIMIT - room + 1, cut), (LIMIT, None), (20_000, None)):
        with pytest.raises(PromptTooLongError, match=f"{tokens} tokens") as refused:
            preflight.render(plain(tokens, its_cut))
        assert refused.value.prompt_tokens == tokens
        assert refused.value.max_model_len == LIMIT


def test_validate_counts_what_the_engine_would_get(demo_model: Path, tmp_path: Path) -> None:
    tables = {"prompt": {"system": SYSTEM, "user": USER}}
    cut = validate(job_of(demo_model, tmp_path, ROWS, **tables))
    assert cut.failed == 1, "its instructions alone are too long"
    assert cut.prompt_tokens["max"] <= LIMIT
    uncut = validate(job_of(demo_model, tmp_path, ROWS, **tables, retry={"on_too_long": "fail"}))
    assert uncut.failed == len(FAIL)
