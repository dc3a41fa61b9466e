"""The job file: everything wrong with it is said at once, in words that help."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from batchkit.config.loading import load_job, make_job, parse_job, parse_value
from batchkit.config.problems import shown
from batchkit.config.tables import JobConfig, Table
from batchkit.errors import JobError
from tests.support.command_line import batchkit

TABLES = [
    name
    for name, field in JobConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Table)
]
KEYS = [
    f"{table}.{key}"
    for table in TABLES
    for key in JobConfig.model_fields[table].annotation.model_fields  # type: ignore[union-attr]
]
DEEP = 5_000
HUGE = "9" * 5_000
JARGON = re.compile(
    r"pydantic|https?://|constrained|literal\[|Traceback|instance of|valid (string|dictionary|list)"
    r"|NoneType|Table\b|validation error|type=|Input should"
)


def tables(**given: Any) -> dict[str, Any]:
    return {"engine": {"kind": "dry-run"}, **given}


def in_table(table: str, name: str, value: Any) -> dict[str, Any]:
    """A job with this key; without a name, ``value`` stands in place of the table."""
    given = {"kind": "dry-run"} if table == "engine" else {}
    return {table: {**given, name: value} if name else value}


def job(*overrides: str, **given: Any) -> JobConfig:
    return make_job(tables(**given), "job.toml", overrides)


def problems(*overrides: str, **given: Any) -> list[str]:
    """The lines of the message, without its head."""
    with pytest.raises(JobError) as refused:
        make_job(tables(**given), "job.toml", overrides)
    assert not JARGON.search(str(refused.value)), str(refused.value)
    head, *lines = str(refused.value).splitlines()
    assert head == f"job.toml: {len(lines)} problem{'s' * (len(lines) > 1)}"
    return [line.strip() for line in lines]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(JobError) as refused:
        call()
    assert not JARGON.search(str(refused.value)), str(refused.value)
    return str(refused.value)


def complaint(call: Callable[[], object]) -> str:
    """The JobError's message, empty where there is none; any other error is a bug."""
    try:
        call()
    except JobError as error:
        return str(error)
    return ""


def write_job(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


# What is wrong is named


def test_all_problems_come_at_once() -> None:
    found = problems(
        nmae="x",
        input={"format": "jsnl", "limit": 0},
        prompt={"imges": ["a"], "chat": "no"},
        sampling={"temperature": -1},
    )
    keys = "input.format input.limit nmae prompt.chat prompt.imges sampling.temperature"
    assert sorted(line.partition(":")[0] for line in found) == keys.split()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"input": {"limit": 0}}, "input.limit: found 0, expected whole number ≥ 1"),
        ({"engine": {"kind": "vlm"}}, 'engine.kind: found "vlm", expected "vllm", …mean \'vllm\'?'),
        (
            {"run": {"max_in_flight": "aut"}},
            'run.max_in_flight: found "aut", expected "auto" …\'auto\'?',
        ),
        ({"prompt": {"imges": []}}, "prompt.imges: unknown key; did you mean 'images'?"),
        ({"smpling": {}}, "smpling: unknown key; did you mean 'sampling'?"),
        ({"limit": 5}, "limit: unknown key; did you mean 'input.limit'?"),
        (
            {"engine": {"kind": "dry-run", "max_tokens": 5}},
            "engine.max_tokens: …'sampling.max_tokens'?",
        ),
        ({"output": {"zzz": 1}}, "output.zzz: unknown key; known: dir, store, …, export_every_s"),
    ],
)
def test_problem_says_key_found_and_expected_and_what_is_near(
    given: dict[str, Any], line: str
) -> None:
    (found,) = problems(**given)
    start, _, end = line.partition("…")
    assert (found.startswith(start), found.endswith(end)) == (True, True), found


@pytest.mark.parametrize("given", ["max_num_partial_prefills=5", "engine.enforce_eager=true"])
def test_option_of_vllm_is_sent_to_its_table(given: str) -> None:
    assert "put vLLM's options into [engine.options]" in problems(given)[0]


KEYS_OF_SECONDS = ["row_timeout_s", "stall_timeout_s", "checkpoint_interval_s"]
BAD_SHARES = [2.5, 1.0, -1, -0.5, "x", [1], float("nan")]


@pytest.mark.parametrize("table", [name for name in TABLES if name not in ("sampling", "pooling")])
def test_unknown_keys_are_refused_in_every_table(table: str) -> None:
    (line,) = problems(**in_table(table, "qqqq", 1))
    assert line.startswith(f"{table}.qqqq: unknown key; ")


@pytest.mark.parametrize("key", ["int", "str", "bool", "float", "a[b]", "a b"])
def test_unknown_key_keeps_its_name_whatever_it_is(key: str) -> None:
    assert problems(**{key: 1})[0].startswith(f"{key}: unknown key; ")
    assert problems(input={key: 1})[0].startswith(f"input.{key}: unknown key; ")


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("input.path", 3, "3"),
        ("input.format", "x" * 5000, f'"{"x" * 78}…'),
        ("input.where", ["a"], '["a"]'),
        ("input.limit", True, "true"),
        ("input.limit", 1.0, "1.0"),
        ("input.limit", "10", '"10"'),
        ("prompt.user", ["a"], '["a"]'),
        ("prompt.images", "a.png", '"a.png"'),
        ("prompt.chat", "no", '"no"'),
        ("prompt.chat_template_kwargs", [], "[]"),
        ("media.min_pixels", -1, "-1"),
        ("engine.options", "x", '"x"'),
        ("engine.kind", 3, "3"),
        ("sampling.temperature", "0", '"0"'),
        ("sampling.temperature", True, "true"),
        ("sampling.max_tokens", 1.5, "1.5"),
        ("run.row_timeout_s", 0, "0"),
        ("run.checkpoint_interval_s", "5s", '"5s"'),
        *((f"run.{key}", n, shown(n)) for key in KEYS_OF_SECONDS for n in (3_000_000, 1e10)),
        ("retry.backoff_s", 1e10, "10000000000.0"),
        ("run.seed", "1", '"1"'),
        *(("run.fail_on_error", value, shown(value)) for value in BAD_SHARES),
        *(("run.max_in_flight", value, shown(value)) for value in (0, -1, 1.5, True, {"a": 1})),
        ("retry.temperatures", 0.7, "0.7"),
        ("output.prompt", 1, "1"),
        *((table, 3, "3") for table in (*TABLES, "vars")),
    ],
    ids=str,
)
def test_wrong_type_is_one_problem_of_its_key(key: str, value: Any, found: str) -> None:
    table, _, name = key.partition(".")
    (line,) = problems(**in_table(table, name, value))
    assert line.startswith(f"{key}: found {found}, ")


def test_wrong_member_of_a_list_is_named_by_its_place() -> None:
    (line,) = problems(prompt={"images": ["a", 7]})
    assert line.startswith("prompt.images.1: found 7, ")
    (line,) = problems(retry={"temperatures": [1, -1]})
    assert line.startswith("retry.temperatures.1: found -1, ")
    (line,) = problems(budget={"price_per_million_tokens": [False, 1.0]})
    assert line.startswith("budget.price_per_million_tokens.0: found false, ")


@pytest.mark.parametrize("name", ["a/b", "", ".hidden", "a b", "../x", "-x"])
def test_name_that_is_no_folder_name_is_refused(name: str) -> None:
    assert problems(name=name)[0].startswith(f'name: found "{name}", ')


def test_engine_table_and_its_model_are_asked_for() -> None:
    assert "engine: this table is missing" in refusal(lambda: parse_job({}, "job.toml"))
    (line,) = problems(engine={})
    assert line.startswith("engine: model is missing")
    assert job(engine={"kind": "dry-run"}).engine.model == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt": {"system": "a", "system_file": "b"}}, "system and system_file"),
        ({"prompt": {"user": "a", "user_file": "b"}}, "user and user_file"),
        ({"prompt": {"chat": False, "system": "x"}}, "chat = false"),
        ({"prompt": {"chat": False, "images": ["x"]}}, "chat = false"),
        ({"media": {"min_pixels": 9, "max_pixels": 5}}, "min_pixels 9 is over max_pixels 5"),
        ({"workers": {"count": "auto", "min": 3, "max": 2}}, "max = 2 is less than min = 3"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(given: dict[str, Any], words: str) -> None:
    (line,) = problems(**given)
    assert words in line
    assert line.startswith(next(iter(given)))


@pytest.mark.parametrize("value", [False, True, 0, 3, 0.0, 0.25, 0.999])
def test_fail_on_error_is_a_switch_a_count_or_a_share(value: Any) -> None:
    found = job(run={"fail_on_error": value}).run.fail_on_error
    assert found == value
    assert type(found) is type(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda part: (
        st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.slow
@given(key=st.sampled_from(KEYS), value=JSON)
def test_any_value_makes_a_job_or_one_problem_in_plain_words(key: str, value: Any) -> None:
    table, _, name = key.partition(".")
    message = complaint(lambda: job(**in_table(table, name, value)))
    assert not JARGON.search(message) or JARGON.search(str(value)), message
    head, *lines = message.splitlines() or [""]
    if "problem" in head:
        keys = [line.strip().partition(":")[0] for line in lines]
        assert len(keys) == len(set(keys))


def test_key_that_breaks_lines_is_reported_on_one() -> None:
    lines = problems(input={"a\rb": 1, "c": 1})
    assert [line.partition(":")[0] for line in lines] == ["input.a\\rb", "input.c"]


# --set


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("name=other", "name", "other"),
        ("name=2024", "name", "2024"),
        ("sampling.temperature=0", "sampling.temperature", 0.0),
        ("sampling.max_tokens= 12 ", "sampling.max_tokens", 12),
        ("engine.model=2024", "engine.model", "2024"),
        ("input.where.Kind=Fact", "input.where", {"Kind": "Fact"}),
        ('input.where.Kind=["Fact", "Trend"]', "input.where", {"Kind": ["Fact", "Trend"]}),
        ("prompt.user=Hello {{ x }}", "prompt.user", "Hello {{ x }}"),
        ("prompt.user=true", "prompt.user", "true"),
        ("prompt.user=", "prompt.user", ""),
        ('prompt.user="with \\n escapes"', "prompt.user", "with \n escapes"),
        ('prompt.images=["a.png", "b.png"]', "prompt.images", ["a.png", "b.png"]),
        ("run.max_in_flight=8", "run.max_in_flight", 8),
        ("run.fail_on_error=0.1", "run.fail_on_error", 0.1),
        ("run.fail_on_error=true", "run.fail_on_error", True),
        ("retry.temperatures=[0.7, 1]", "retry.temperatures", [0.7, 1.0]),
        ("vars.a.b=[1]", "vars", {"a": {"b": [1]}}),
        ("vars={ a = 1 }", "vars", {"a": 1}),
        ("engine.options.max_num_seqs=64", "engine.options", {"max_num_seqs": 64}),
        ("engine.options.limit.image=1", "engine.options", {"limit": {"image": 1}}),
    ],
)
def test_any_key_can_be_set(override: str, key: str, value: Any) -> None:
    found: Any = job(override)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_later_override_wins_and_the_rest_stays() -> None:
    found = job("vars.a=1", "vars.a=2", vars={"b": 3})
    assert found.vars == {"a": 2, "b": 3}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        *(
            (override, f"--set {override}: write KEY=VALUE")
            for override in ("limit", "=3", "a..b=1", ".a=1", "a.=1", "")
        ),
        ("engine.kind.x=1", "--set engine.kind.x=1: engine.kind is a single value and has no keys"),
        ("smpling.temperature=0", "smpling: unknown key; did you mean 'sampling'?"),
        ("input.limit=many", 'input.limit: found "many", '),
        ("input=3", "input: found "),
        (f"vars{'.a' * DEEP}=1", "nested more than 100 deep"),
        (f"run.seed={HUGE}", 'run.seed: found "9999'),
        (f"run.seed={2**65}", "run.seed: found a number of 66 bits"),
        ("vars.a=\udc80", "vars.a: found text that is not valid UTF-8"),
    ],
    ids=lambda text: text[:20],
)
def test_override_is_checked_like_the_file(override: str, message: str) -> None:
    found = refusal(lambda: job(override))
    assert message in found
    assert len(found) < 500


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0),
        ("true", True),
        ("['a', 1]", ["a", 1]),
        ("{ a = 1 }", {"a": 1}),
        ("mix", "mix"),
        ("1\ny = 2", "1\ny = 2"),
        ("it's # not a comment", "it's # not a comment"),
    ],
)
def test_value_is_toml_where_it_is_toml_and_else_text(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_dry_run_in_place_of_any_engine_leaves_out_what_only_that_knows() -> None:
    server = {"kind": "openai-server", "model": "m", "base_url": "http://h/v1"}
    vllm = {"model": "n", "lora": "l", "options": {"max_model_len": 9}}
    for engine in (server, vllm):
        found = job("engine.kind=dry-run", engine=dict(engine))
        assert (found.engine.kind, found.engine.model) == ("dry-run", engine["model"])
        assert (found.engine.options, found.engine.base_url, found.engine.lora) == ({}, None, None)
    with_own = job("engine.options.latency_s=1", "engine.kind=dry-run", engine=vllm)
    assert with_own.engine.options == {"latency_s": 1}
    kept = job("engine.kind=dry-run", engine={"kind": "dry-run", "options": {"latency_s": 1}})
    assert kept.engine.options == {"latency_s": 1}


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["limit", "5"], "limit"),
        (["input.limit", "=", "5"], "input.limit"),
        (["max_model_len", "5"], "max_model_len"),
    ],
)
def test_value_in_a_word_of_its_own_says_how_to_write_it(words: list[str], setting: str) -> None:
    refused = batchkit("run", "job.toml", "--set", *words).refused()
    expected = f"batchkit: error: --set {setting}: write KEY=VALUE without spaces, for example "
    assert refused.startswith(expected)


# Paths


def test_paths_are_looked_up_beside_the_job_file_and_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, here = tmp_path / "jobs", tmp_path / "here"
    path = write_job(
        jobs,
        "[input]\npath = 'rows.jsonl'\n[prompt]\nuser_file = 'q.j2'\nsystem_file = 'no.j2'\n"
        "[media]\nroot = 'images'\n[engine]\nkind = 'dry-run'\n",
    )
    here.mkdir()
    (jobs / "rows.jsonl").touch()
    (here / "rows.jsonl").touch()
    (here / "q.j2").touch()
    (here / "images").mkdir()
    monkeypatch.chdir(here)
    found = load_job(path)
    assert found.input.path == str(jobs / "rows.jsonl")
    assert found.prompt.user_file == str(here / "q.j2")
    assert found.media.root == str(here / "images")
    assert found.prompt.system_file == str(jobs / "no.j2"), "named beside the job"
    assert found.folder == here / "output" / "batch"


def test_glob_is_found_where_it_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "a.csv").touch()
    monkeypatch.chdir(here)
    path = write_job(tmp_path / "jobs", "[input]\npath = '*.csv'\n[engine]\nkind = 'dry-run'\n")
    assert load_job(path).input.path == str(here / "*.csv")


@pytest.mark.parametrize("path", ["/data/rows.jsonl", "s3://bucket/rows.jsonl", "hf://d/x/*.csv"])
def test_absolute_paths_and_urls_stay_as_they_are(path: str) -> None:
    assert job(f"input.path={path}").input.path == path


def test_vars_fill_input_path_and_media_root(tmp_path: Path) -> None:
    found = job(
        vars={"root": str(tmp_path), "part": 3},
        input={"path": "{{ root }}/rows-{{ part }}.jsonl"},
        media={"root": "{{ root }}/images"},
    )
    assert found.input.path == f"{tmp_path}/rows-3.jsonl"
    assert found.media.root == f"{tmp_path}/images"


@pytest.mark.parametrize("key", ["input.path", "media.root"])
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ wher }}/a", "'wher' is undefined; [vars] has ['where']"),
        ("{{ where", "unexpected end of template"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ range(10**12) | list }}", "Range too big"),
        ("{{ where.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_path_that_cannot_be_filled_in_names_key_and_reason(
    key: str, template: str, words: str
) -> None:
    message = refusal(lambda: job(f"{key}={template}", vars={"where": "x"}))
    assert message.startswith(f"{key}: {template!r}: ")
    assert words in message


@pytest.mark.parametrize("key", ["prompt.user_file", "media.root", "input.path"])
def test_text_in_the_place_of_a_path_is_no_crash(key: str) -> None:
    """A prompt given as user_file, say: the system refuses names over 255 bytes."""
    message = complaint(lambda: job(f"{key}={'a long prompt ' * 50}"))
    assert not message or message.startswith(f"{key}: ")


# The file


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no.toml"
    assert refusal(lambda: load_job(missing)) == f"{missing}: no such job file"
    assert refusal(lambda: load_job(tmp_path)).startswith(f"{tmp_path}: is a folder")
    os.mkfifo(tmp_path / "pipe.toml")
    os.truncate(write_job(tmp_path / "huge", ""), 1 << 40)
    huge = tmp_path / "huge/job.toml"
    assert refusal(lambda: load_job(huge)).startswith(f"{huge}: can't be read: it has 1,099,")
    for path, kind in ((tmp_path / "pipe.toml", "a named pipe"), (Path("/dev/zero"), "a device")):
        assert refusal(lambda: load_job(path)).startswith(f"{path}: can't be read: it is {kind}")  # noqa: B023
        assert batchkit("validate", str(path)).exit_code == 2
    below = write_job(tmp_path, "name = 'x'\n") / "x.toml"
    assert refusal(lambda: load_job(below)).startswith(f"{below}: can't be read")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("model = Qwen/Qwen3", 'Invalid value; write text in straight quotes ("text")'),
        ('name = "x', "Illegal character"),
        ("[engine", "Expected ']'"),
        ("name = 'b'", "Cannot overwrite a value"),
        ("hf_token = hf_abcdefgh12345678", "Invalid value"),
    ],
)
def test_line_that_is_no_toml_is_shown_without_its_secrets(
    line: str, words: str, tmp_path: Path
) -> None:
    path = write_job(tmp_path, f"name = 'x'\n{line}\n")
    message = refusal(lambda: load_job(path))
    assert message.startswith(f"{path}: not valid TOML: line 2: {words}")
    assert message.endswith(f"\n  {line.replace('hf_abcdefgh12345678', '***')}")


SCHEMA_FILE = {"structured_outputs": {"json": "schema.json"}}


@pytest.mark.parametrize(
    "given",
    [
        {"sampling": SCHEMA_FILE},
        {"steps": [{"name": "a", "prompt": {"user": "{{ q }}"}, "sampling": SCHEMA_FILE}]},
    ],
)
def test_a_schema_is_read_from_its_file(given: dict[str, Any], tmp_path: Path) -> None:
    def wanted() -> Any:
        made = make_job(tables(**deepcopy(given)), "job.toml", base=tmp_path)
        return (made.steps[0] if made.steps else made).sampling.params()["structured_outputs"]

    assert f"{tmp_path}/schema.json: No such file" in refusal(wanted)
    (tmp_path / "schema.json").write_text("{'type'")
    assert "schema.json: is not JSON" in refusal(wanted)
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    assert wanted() == {"json": {"type": "object"}}


def test_file_is_utf8_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbfname = 'bom'\n[engine]\nkind = 'dry-run'\n")
    assert load_job(path).name == "bom"
    path.write_bytes("name = 'caf\u00e9'".encode("latin-1"))
    assert refusal(lambda: load_job(path)) == f"{path}: is not UTF-8 text; save the file as UTF-8"


# The job from Python


def test_job_can_be_made_from_python_with_defaults() -> None:
    found = JobConfig(engine={"model": "some/model"})
    assert found == parse_job({"engine": {"model": "some/model"}}, "x")
    assert found.name == "batch"
    assert found.folder == Path("output/batch")
    assert found.sampling.params() == {"temperature": 0.0, "max_tokens": 256}
    assert found.run.max_in_flight == "auto"
    assert found.run.fail_on_error is False
    assert found.retry.attempts == 2


def test_sampling_passes_every_name_on_but_its_own() -> None:
    found = job(sampling={"top_k": 5, "stop": ["x"], "sampling_column": "params"})
    defaults = {"temperature": 0.0, "max_tokens": 256}
    assert found.sampling.params() == {**defaults, "top_k": 5, "stop": ["x"]}


@pytest.mark.parametrize("key", KEYS)
def test_job_is_frozen(key: str) -> None:
    table, _, name = key.partition(".")
    with pytest.raises(ValidationError, match="frozen"):
        setattr(getattr(job(), table), name, None)
