"""An answer that would take too long to score is unscored, and the reason is reported."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from batchkit.commands.score import score_run
from batchkit.config.tables import ScoringTable
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.runs.scores import table_of
from batchkit.scoring import Scored, Scoring
from batchkit.scoring.extract import extracted
from batchkit.scoring.overlap import overlap, pair
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.score_store import read_scored
from tests.support import dry_runs

pytestmark = pytest.mark.slow

ENDLESS = r"(\w+\s?)+$"


def scored(text: str, reference: str = "a", **table: Any) -> Scored:
    scoring = Scoring(ScoringTable.model_validate({"reference": "a", **table}))
    return scoring.score(text, {"a": reference}, "row")


@pytest.mark.parametrize(
    ("text", "pattern", "reason"),
    [
        ("never any end " * 400 + "!", ENDLESS, "did not finish within 2 s of CPU time"),
        ("a" * 40 + "!", ENDLESS, ""),
        (("x" * 18 + "!") * 10_000, r"(?:x+)+y|!", ""),
        ("a" * 3_900_000, r"(?:(?:(a)|(b))|(c))*d", ""),
    ],
    ids=["endless", "short", "many matches", "memory"],
)
def test_a_pattern_that_needs_too_much_leaves_its_row_unscored(
    text: str, pattern: str, reason: str
) -> None:
    found = scored(text, extract={"regex": {"pattern": pattern}}, scorers=["em", "f1"])
    assert found.scores == {"em": None, "f1": None}
    assert f"the pattern `{pattern}` {reason}" in str(found.unscored)
    sound = scored("the end", extract={"regex": {"pattern": r"\w+$"}}, scorers=["em"])
    assert sound.prediction == "end"


PATTERNS = [
    r"Answer: (\w+)",
    r"\s(\S+)\s*$",
    r"\\frac{d}{dx}",
    r"x{i}",
    r"(?:cat){e}",
    r"[[:alpha:]]+",
    r"(?i)straße",
    r"(a*)+",
    r"(?:(a)|b)*",
    r"\W(\w)\W*$",
    r"\x41|\0",
]
TEXTS = ["Answer: m²", "Answer: CO₂", "Answer: ½", "Answer: नमस्ते", "a\x1cb c\x1fd", "xi x{i}", ""]
TEXTS += ["\ud800 A", "\\frac{d}{dx} y", "cat cut {e} cat{e}", "[a:] abc", "STRASSE Straße"]
TEXTS += ["aab ab", "B.\u200b", "a\0"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_read_as_pythons_re_reads_it(pattern: str) -> None:
    table = ScoringTable(extract={"regex": {"pattern": pattern}})
    for text in TEXTS:
        *_, last = [None, *re.finditer(pattern, text)]
        found = None if last is None else last[1 if last.re.groups else 0]
        assert extracted(text, table) == (None if found is None else found.strip())


def test_a_long_answer_of_many_matches_is_scored() -> None:
    extract = {"regex": {"pattern": r"\S+"}}
    found = scored("ab " * 1_300_000 + "end", extract=extract, scorers=["em"])
    assert (found.prediction, found.unscored) == ("end", None)


def matchers() -> list[psutil.Process]:
    servers = (
        child
        for child in psutil.Process().children()
        if "batchkit.isolation.pattern_child" in child.cmdline()
    )
    return [matcher for server in servers for matcher in server.children()]


def test_a_process_that_somebody_ends_costs_no_score() -> None:
    extract = {"regex": {"pattern": r"(?:\w+|\s)+$"}}
    table: dict[str, Any] = {"extract": extract, "scorers": ["em"]}
    assert scored("the end", **table).prediction == "the end"
    assert matchers()
    for process in matchers():
        process.kill()
    assert scored("an end", **table).prediction == "an end"


def test_why_a_row_is_unscored_is_in_its_record_and_in_the_table(tmp_path: Path) -> None:
    scoring = {"reference": "a", "scorers": ["em"]}
    job = dry_runs.job(output={"dir": str(tmp_path)}, scoring=scoring)
    rows = [{"prompt": "short", "a": "b"}, {"prompt": "long", "a": "b" * 200_001}]
    folder = tmp_path / "a"
    assert ProductionBatchProcessor(job, quiet=True).process(rows).ok == 2
    records = {r["index"]: r for r in read_newest(folder / RESULTS)}
    reason = "the scorer em: the reference has more than 200,000 characters"
    assert "unscored" not in records[0]
    assert (records[1]["scores"], records[1]["unscored"]) == ({"em": None}, reason)
    for table in (table_of(folder), score_run(folder, job, say=lambda line: None)):
        assert table.to_json()["overall"]["unscored_because"] == {reason: 1}
        assert f"unscored, 1 rows: {reason}" in table.to_text()
    assert [record.get("unscored") for record in read_scored(folder)] == [None, reason]


@pytest.mark.parametrize(
    "text",
    [
        "{" * 128_000,
        "[" * 128_000,
        '{"' * 64_000,
        "[1," * 60_000,
        '["' * 64_000,
        "{ " * 64_000,
        "[" * 900 + '"' + "a" * 300_000,
        '{"a":' * 50_000,
    ],
    ids=lambda text: text[:3],
)
def test_brackets_that_begin_nothing_take_no_time(text: str) -> None:
    found = scored(text + ' {"k": 1}', extract={"json": {"key": "k"}}, scorers=["em"])
    assert found.prediction == "1" or found.unscored is not None


def test_json_is_found_behind_many_other_brackets() -> None:
    text = 'f(){ return {a: [x]} } "{" ' * 20_000 + '{"k": {"deep": [1, "é{"]}} and {so} on'
    assert scored(text, extract={"json": {"key": "k"}}).prediction == '{"deep":[1,"é{"]}'


@pytest.mark.parametrize("scorer", ["f1", "em", "rouge-l", "sacrebleu", "numeric"])
def test_a_text_beyond_any_answer_is_unscored(scorer: str) -> None:
    found = scored("1 word " * 40_000, reference="1 word", scorers=[scorer])
    assert found.scores == {scorer: None}
    assert "the prediction has more than 200,000 characters" in found.unscored
    reward = scored("score: 7 " + "word " * 800_000, extract="reward", scorers=["reward"])
    assert "4,000,000 characters" in str(reward.unscored)


def test_long_texts_below_the_bound_are_scored() -> None:
    words = [f"w{random.Random(n).randrange(5000)}" for n in range(30_000)]
    text, reference = " ".join(words), " ".join(reversed(words))
    found = scored(text, reference=reference, scorers=["rouge-l", "sacrebleu", "f1", "em"])
    assert found.unscored is None
    assert found.scores["f1"] == 1.0
    assert 0 < (found.scores["rouge-l"] or 0) < 1


@given(st.lists(st.sampled_from("abcd")), st.lists(st.sampled_from("abcd")))
def test_rouge_l_is_that_of_rouge_score(one: list[str], other: list[str]) -> None:
    prediction, reference = "x " + " ".join(one), "x " + " ".join(other)
    right = RougeScorer(["rougeL"], use_stemmer=False)
    texts = pair(prediction, reference, "official")
    expected = right.score(texts.reference, texts.prediction)["rougeL"].fmeasure
    assert overlap("rouge-l", texts, "official") == round(expected * 100, 2) / 100
