"""A run whose job or input changed since it began: refused, moved aside, or continued with ``requeue``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from fsspec import filesystem
from fsspec.implementations.dirfs import DirFileSystem

from batchkit.config.loading import make_job
from batchkit.errors import JobError
from tests.support.command_line import Ended
from tests.support.dry_runs import (
    LOG,
    RUN,
    manifest,
    prepare,
    records,
    run,
    settled,
    verify,
    write_job,
    write_rows,
)
from tests.support.images import BLUE, png

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


SHOP = "vars.page=https://shop.example"
TOOLS = 'sampling.structured_outputs={json={type="object", properties=%s}}'
KEYS, OTHER_ORDER = "{a={minimum=1}, c={}, d=true}", "{c={}, d=true, a={minimum=1}}"
SAME = ""


@pytest.mark.parametrize(
    ("then", "now", "difference"),
    [
        ([], ["sampling.temperature=0.5"], "sampling.temperature: 0.0 → 0.5"),
        ([], ["sampling.top_k=3"], "sampling.top_k: null → 3"),
        ([], ["prompt.user=Say {{ q }}"], 'prompt.user: "{{ q }}" → "Say {{ q }}"'),
        ([], ["prompt.system=Be brief"], 'prompt.system: null → "Be brief"'),
        ([], ["vars.mode=mix"], 'vars.mode: null → "mix"'),
        ([], ["run.seed=1"], "run.seed: 0 → 1"),
        ([], ["engine.options.latency_s=0.001"], "engine.options.latency_s: null → 0.001"),
        ([], ["engine.model=other"], 'engine.model: "" → "other"'),
        ([], ["media.max_pixels=1000"], "media.max_pixels: 1605632 → 1000"),
        ([], ["retry.temperatures=[0.5]"], "retry.temperatures: null → [0.5]"),
        ([], ["input.id=key"], 'input.id: null → "key"'),
        ([], ["output.parse=json"], 'output.parse: null → "json"'),
        # All at once
        ([], ["sampling.seed=1", "vars.x=1"], "sampling.seed: null → 1\n  vars.x: null → 1"),
        # Texts that look like secrets
        (["vars.persona=Credentials: MD"], ["vars.persona=Credentials: PhD"], "vars.persona: "),
        ([f"{SHOP}/item?code=front"], [f"{SHOP}/item?code=back"], "vars.page: "),
        ([f"{SHOP}/?set=Charts-2024-Real"], [f"{SHOP}/?set=Charts-2025-Real"], "vars.page: "),
        ([f"{SHOP}/?key=few/shot-0001.png"], [f"{SHOP}/?key=few/shot-0002.png"], "vars.page: "),
        (["sampling.regex=auth=(yes|no)"], ["sampling.regex=auth=(yes|maybe)"], "sampling.regex: "),
        (['sampling.stop=["***"]'], ['sampling.stop=["###"]'], "sampling.stop: "),
        ([f"{SHOP}/?key=AIzaSyA-1234567890-abc"], [f"{SHOP}/?key=AIzaSyB-0987654321-cba"], SAME),
        # Numbers of another type, and another order of keys, are another prompt
        (["vars.n=1"], ["vars.n=1.0"], "vars.n: "),
        (["vars.n=1"], ["vars.n=true"], "vars.n: "),
        (["vars.n=[0]"], ["vars.n=[false]"], "vars.n: "),
        (["vars.n={a = 1}"], ["vars.n={a = 1.0}"], "vars.n: "),
        ([f"vars.t={KEYS}"], [f"vars.t={OTHER_ORDER}"], "vars.t: "),
        ([f"vars.t=[{{a=1}}, {KEYS}]"], [f"vars.t=[{{a=1}}, {OTHER_ORDER}]"], "vars.t: "),
        ([TOOLS % KEYS], [TOOLS % OTHER_ORDER], "sampling.structured_outputs: "),
        (
            [f"prompt.chat_template_kwargs={KEYS}"],
            [f"prompt.chat_template_kwargs={OTHER_ORDER}"],
            "prompt.chat_template_kwargs: ",
        ),
        # … but not where no prompt has it
        (["vars={b=1, a=2}"], ["vars={a=2, b=1}"], SAME),
        (["input.where={key=['k0', 'k1', 'k2'], q=['question 0', 'question 1', 'question 2']}"],
         ["input.where={q=['question 0', 'question 1', 'question 2'], key=['k0', 'k1', 'k2']}"],
         SAME),
        (["prompt.texts={b='t.txt', a='t.txt'}"], ["prompt.texts={a='t.txt', b='t.txt'}"], SAME),
        # What changes only the speed
        ([], ["engine.options.max_num_seqs=2"], SAME),
        ([], ["run.max_in_flight=3", "run.checkpoint_interval_s=0.1", "run.render_threads=1"], SAME),
        ([], ["run.fail_on_error=0.5"], SAME),
        ([], ["media.max_bytes=100"], SAME),
        ([], ["retry.attempts=5"], SAME),
    ],
)  # fmt: skip
def test_an_edit_is_refused_with_the_difference_or_is_none(
    then: list[str], now: list[str], difference: str
) -> None:
    def start(edits: list[str], *args: str) -> Ended:
        return run(*args, *(word for edit in edits for word in ("--set", edit)))

    Path("t.txt").write_text("text")
    prepare(3)
    assert start(then, "--limit", "2").exit_code == 0
    before = LOG.read_bytes(), manifest()
    found = start(now)
    if difference == SAME:
        assert found.exit_code == 0, found.stderr
    else:
        assert (found.exit_code, found.stdout) == (2, "")
        assert f"  {difference}" in found.stderr
        assert "--fresh" in found.stderr
        assert (LOG.read_bytes(), manifest()) == before
        assert start(then).exit_code == 0
    assert settled() == dict.fromkeys(range(3), "ok")


@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("vars.limits.most", "a finite number or a text"),
        ("sampling.logit_bias.5", "a finite number"),
        ("engine.options.extra_body.logit_bias.5", "a finite number"),
        ("prompt.chat_template_kwargs.most", "a finite number"),
        ("input.where.n", "a finite number"),
    ],
)
def test_numbers_that_json_makes_one_are_refused_where_they_decide_answers(
    key: str, expected: str, number: str
) -> None:
    with pytest.raises(JobError, match=f"{key}: found {number}, expected {expected}"):
        make_job({"engine": {"kind": "dry-run"}}, "the test", [f"{key}={number}"])


@pytest.mark.parametrize("root", ["media", "memory://media"])
def test_changed_file_of_all_prompts_is_refused(root: str) -> None:
    prepare(
        3,
        prompt={
            "user": "{{ rules }} {{ q }}",
            "texts": {"rules": "{{ folder }}/rules.txt"},
            "images": ["good.png"],
        },
        vars={"folder": "texts"},
        media={"root": root},
    )
    store = DirFileSystem("media", filesystem("memory" if "://" in root else "file"))
    store.makedirs("texts", exist_ok=True)
    store.pipe({"texts/rules.txt": b"Be brief.", "good.png": png()})
    assert run().exit_code == 0
    for name, content, key in (
        ("texts/rules.txt", b"Be long.", "prompt.texts.rules"),
        ("good.png", png(BLUE), "prompt.images.0"),
    ):
        before = store.cat_file(name)
        store.pipe_file(name, content)
        found = run()
        assert found.exit_code == 2
        assert f'prompt.files: {{"{key}"' in found.stderr
        store.pipe_file(name, before)
        assert run().exit_code == 0
    store.rm_file("texts/rules.txt")
    assert run().exit_code == 0  # nothing can be mixed: every further row would fail
    store.pipe_file("texts/rules.txt", b"Be long.")
    assert run().exit_code == 2  # it is still known what the rows were answered with


def test_file_beside_a_web_address_is_compared() -> None:
    sources = ["good.png", "http://127.0.0.1:9/bad.png", "also.png"]
    kept = {"vars": {"shots": sources}, "run": {"check_rows": 0}}
    prepare(3, prompt={"images": ["{{ shots }}"]}, **kept)
    for name in ("good.png", "also.png"):
        Path(name).write_bytes(png())
    assert run("--limit", "1").exit_code == 3
    Path("also.png").write_bytes(png(BLUE))
    assert "no row was answered before, so the run starts from the beginning" in run().stderr


def test_file_that_a_row_names_is_not_compared() -> None:
    prepare(3, prompt={"user": "{{ page }}", "texts": {"page": "{{ key }}.txt"}})
    for n in range(3):
        Path(f"k{n}.txt").write_text("one")
    assert run().exit_code == 0
    Path("k0.txt").write_text("two")
    assert run().exit_code == 0


def test_changed_template_file_is_refused() -> None:
    Path("user.j2").write_text("one {{ q }}")
    prepare(3)
    text = Path("job.toml").read_text().replace('user = "{{ q }}"', 'user_file = "user.j2"')
    Path("job.toml").write_text(text)
    assert run().exit_code == 0
    Path("user.j2").write_text("two {{ q }}")
    found = run()
    assert found.exit_code == 2
    assert 'prompt.user: "one {{ q }}" → "two {{ q }}"' in found.stderr


@pytest.mark.parametrize("change", ["edit", "append", "truncate", "a second file"])
def test_changed_input_is_refused_by_the_name_of_its_file(change: str) -> None:
    rows = write_rows(5)
    write_job(input={"path": "in*.jsonl"})
    run()
    if change == "a second file":
        Path("in2.jsonl").write_text('{"q": "more"}\n')
        assert "in2.jsonl: none →" in run().stderr
        return
    write_rows(
        {"edit": [*rows[:4], {"q": "edited"}], "append": [*rows, rows[0]]}.get(change, rows[:4])
    )
    found = run()
    assert found.exit_code == 2
    how = "1 lines were appended" if change == "append" else "bytes, "
    assert f"input {Path('in.jsonl').resolve()}: {how}" in re.sub(
        r": [\d,]+ bytes", ": bytes", found.stderr
    )
    assert len(records()) == 5


def test_a_column_that_a_table_has_more_is_named() -> None:
    write_job(input={"path": "in.csv"})
    Path("in.csv").write_text("q\na\n")
    run()
    Path("in.csv").write_text("q,stars\na,5\n")
    assert "read as csv, column 'stars' added" in run().stderr


def test_touched_or_moved_input_is_no_change() -> None:
    prepare(5)
    run("--limit", "2")
    os.utime("in.jsonl", (1, 1))
    assert run("--limit", "3").exit_code == 0
    Path("elsewhere").mkdir()
    Path("in.jsonl").rename("elsewhere/rows.jsonl")
    assert run("--set", "input.path=elsewhere/rows.jsonl").exit_code == 0
    assert settled() == dict.fromkeys(range(5), "ok")


def test_changes_before_the_first_record_are_no_change() -> None:
    prepare(3)
    refused = run("--set", "engine.options.nonsense=1")
    assert refused.exit_code == 2
    assert "engine.options.nonsense" in refused.stderr
    assert RUN.exists()
    write_rows(4)
    assert run("--set", "sampling.temperature=1").exit_code == 0
    assert len(settled()) == 4
    assert run().exit_code == 2  # by now the run stands for temperature 1


# On change


def test_on_change_new_moves_the_old_run_aside() -> None:
    prepare(3)
    run()
    old = LOG.read_bytes()
    found = run("--on-change", "new", "--set", "vars.x=1")
    assert (found.exit_code, found.json["skipped"]) == (0, 0)
    assert "vars.x: null → 1" in found.stderr
    assert "output/a.1" in found.stderr
    assert Path("output/a.1/results.jsonl").read_bytes() == old
    assert len(settled()) == 3
    assert len(manifest()["starts"]) == 1


@pytest.mark.parametrize("on_change", ["new", "requeue"])
def test_on_change_does_nothing_without_a_change(on_change: str) -> None:
    prepare(3)
    run()
    assert run("--on-change", on_change).json["skipped"] == 3
    assert not Path("output/a.1").exists()


FOUR = [{"key": f"k{n}", "q": f"question {n}"} for n in range(4)]
EDITED, FAILS = {"key": "k9", "q": "edited"}, {"key": "b"}
MOVED = [{"key": "new", "q": "inserted"}, *FOUR[:2], {"key": "k2", "q": "edited"}]
TWINS = [{"key": "twin", "q": "x"}] * 2


@pytest.mark.parametrize(
    ("ids", "then", "now", "args", "kept", "failed"),
    [
        pytest.param({"id": "key"}, FOUR, MOVED, [], 2, [], id="moved"),
        pytest.param({}, FOUR, [FOUR[0], EDITED, *FOUR[2:], EDITED], [], 3, [], id="in place"),
        pytest.param(
            {"id": "key"}, [FOUR[0], FAILS, FOUR[2]], [FAILS, FOUR[2]], [], 2, [0], id="failed"
        ),
        pytest.param({"id": "key"}, [*TWINS, FOUR[0]], [*TWINS, EDITED], [], 2, [], id="of one id"),
        pytest.param({}, FOUR, [EDITED, *FOUR[1:]], ["--limit", "2"], 3, [], id="past the limit"),
        pytest.param({}, FOUR, FOUR, ["--set", "sampling.temperature=1"], 0, [], id="another job"),
    ],
)
def test_requeue_keeps_what_is_the_same_and_runs_the_rest(
    ids: dict[str, Any],
    then: list[dict[str, Any]],
    now: list[dict[str, Any]],
    args: list[str],
    kept: int,
    failed: list[int],
) -> None:
    write_rows(then)
    write_job(input=ids)
    run()
    old = LOG.read_bytes()
    write_rows(now)
    found = run("--on-change", "requeue", *args)
    assert (found.exit_code, found.json["skipped"]) == (3 if failed else 0, kept)
    assert f"{kept} records kept, {len(then) - kept} rows to run again" in found.stderr
    assert settled() == {n: "failed" if n in failed else "ok" for n in range(len(now))}
    if ids:
        assert {r["index"]: r["id"] for r in records()} == {n: r["key"] for n, r in enumerate(now)}
    assert verify() | {"mixed": 0, "lost": 0, "duplicates": 0, "pending": 0} == verify()
    assert (RUN / "results.jsonl.before-1").read_bytes() == old
    assert run(*args).json["skipped"] == len(now)  # the changed input is the run's own now


def test_fresh_moves_each_earlier_run_aside_and_does_not_ask_what_changed() -> None:
    prepare(3)
    for n in range(3):
        assert run("--fresh", "--set", f"sampling.temperature={n}").json["skipped"] == 0
    assert sorted(path.name for path in Path("output").iterdir()) == ["a", "a.1", "a.2"]
    assert all(len(settled(path / "results.jsonl")) == 3 for path in Path("output").iterdir())


def test_mistyped_option_does_not_cost_the_folder_its_place() -> None:
    prepare(3)
    run()
    found = run("--fresh", "--set", "engine.options.lateny_s=1")
    assert found.exit_code == 2
    assert not Path("output/a.1").exists()
    assert len(settled()) == 3


def test_fresh_outlives_a_damaged_manifest() -> None:
    prepare(3)
    run()
    (RUN / "manifest.json").write_text("")
    assert "--fresh" in run().stderr
    assert run("--fresh").exit_code == 0
