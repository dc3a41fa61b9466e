"""``[[steps]]``, ``[rollout]``, ``[engines.NAME]`` and ``[scoring]`` in a job file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from batchkit.config.loading import load_job, make_job
from batchkit.config.masking import masked
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.storage.job_toml import job_of_run, with_secrets_of, write_job
from tests.support.command_line import batchkit
from tests.support.rows import write_jsonl

CANARY = "c4nary-Xy7-of-a-coal-mine"
DRY = {"kind": "dry-run"}
TOOL = {"type": "function", "function": {"name": "add"}}
FORCED = {"user": "x", "tools": [TOOL], "tool_choice": "required"}
NO_SCHEMA = {"structured_outputs": {"json": {"type": "x"}}}


def step(name: str = "draft", **keys: Any) -> dict[str, Any]:
    return {"name": name, "prompt": {"user": "{{ q }}"}, **keys}


def made(*overrides: str, **tables: Any) -> JobConfig:
    return make_job({"engine": DRY, **tables}, "job.toml", overrides)


def problems(*overrides: str, **tables: Any) -> list[str]:
    with pytest.raises(JobError) as refused:
        made(*overrides, **tables)
    return [line.strip() for line in str(refused.value).splitlines()[1:]]


def write_toml(**tables: Any) -> None:
    given = {"name": "a", "input": {"path": "in.jsonl"}, "engine": DRY, **tables}
    Path("job.toml").write_text(tomlkit.dumps(given))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", [{"q": "a"}])
    return tmp_path


# What is wrong is named


ENGINE = {"judge": DRY}
VLLM = {"model": "m"}
USER = {"user": "{{ q }}"}
BY_ROW = {**USER, "lora": "{{ a }}"}
GPU_HOURS = {"price_per_gpu_hour": 2.0}
SOLVE = {"function": "a:b"}
REASK = {"retry": {"reask": 1, "reask_note": "x"}}
SERVER = {"kind": "openai-server", "model": "m", "base_url": "http://a/v1"}
WRONG: list[tuple[dict[str, Any], str]] = [  # …: any text between, or behind it
    ({"engine": VLLM, "prompt": BY_ROW}, "prompt.lora: there are no named adapters; add"),
    ({"engine": {**VLLM, "loras": {"a": "x"}}, "prompt": USER}, "engine.loras: no row uses them"),
    (
        {"engine": {**VLLM, "kind": "transformers"}, "steps": [step(prompt=BY_ROW)]},
        'steps.draft.prompt.lora: engine.kind "transformers" supports one adapter; set engine.lora, or use "vllm"',
    ),
    (
        {"engine": {**VLLM, "loras": {"a": "x"}, "lora": "y"}, "prompt": BY_ROW},
        "engine: lora applies to all rows, but loras to single rows: keep one",
    ),
    (
        {"engine": {**VLLM, "loras": {" a": "x"}}, "prompt": BY_ROW},
        "engine: loras: ' a' is not a valid adapter name; use a name that is not empty and has no",
    ),
    ({"steps": [step(), step("b", smapling={})]}, "steps.b.smapling: …mean 'sampling'?"),
    (
        {"steps": [step(sampling={"temperature": "x"})]},
        'steps.draft.sampling.temperature: found "x", expected number ≥ 0 or text like {{ column }}',
    ),
    ({"steps": [step(user="x")]}, "steps.draft.user: unknown key; did you mean 'prompt.user'?"),
    ({"steps": [{"prompt": {}}]}, "steps.0.name: this key is missing"),
    ({"steps": [step("a b")]}, 'steps.0.name: found "a b", expected text of letters, digits and _'),
    ({"steps": [step(), step("draft")]}, "steps: two steps are named 'draft'; give each step its"),
    ({"steps": [step("items")]}, "steps.items: templates can't read steps.items, which is a"),
    ({"steps": [3]}, "steps.0: found 3, expected table"),
    ({"steps": {}}, "steps: found {}, expected list of tables; write [[steps]] instead of [steps]"),
    ({"step": [step()]}, "step: unknown key; did you mean 'steps'?"),
    ({"steps": [step(extract="regex")]}, "steps.draft.extract.regex.pattern: this key is missing"),
    ({"steps": [step(), step("b", prompt={"system": "x"})]}, "steps.b.prompt: has no user"),
    ({"steps": [step(answer=False)]}, "steps: all steps have answer = false, but one step must"),
    (
        {"steps": [step()], "prompt": USER},
        "prompt.user: leave it out, because [[steps]] has its own prompts",
    ),
    ({"steps": [step()], "output": {"parse": "json"}}, "output.parse: has no effect with"),
    (
        {"steps": [step(parse="json")], "sampling": NO_SCHEMA},
        "steps.draft.sampling.structured_outputs.json: not a valid JSON schema: $.type: 'x' is not",
    ),
    (
        {"steps": [step(prompt=FORCED, engine="judge")], "engines": {"judge": VLLM}},
        "steps.draft.prompt.tool_choice: forcing a call needs engine.tool_call_parser: set it to vL",
    ),
    ({"steps": [step()], **REASK}, "retry.reask: has no effect, because all answers are accepted"),
    (
        {"steps": [step(extract="code", scorers=["chart"])]},
        "steps.draft.scorers: chart is computed after the run; put it into scoring.scorers",
    ),
    ({"steps": [step()], "vars": {"steps": 1}}, "vars.steps: 'steps' is the name of the earlier"),
    (
        {"steps": [step(engine="jugde")], "engines": ENGINE},
        "steps.draft.engine: found 'jugde', expected one of [engines]: judge; did you mean 'judge'?",
    ),
    (
        {"engines": {"judge": {"model": "x", "server": {"comand": "x"}}}},
        "engines.judge.server.comand: unknown key; did you mean 'command'?",
    ),
    ({"engines": {"judge": 3}}, "engines.judge: found 3, expected table"),
    ({"steps": [step()], "engines": ENGINE}, "engines.judge: no step uses it; set engine ="),
    ({"steps": [step(engine="a.b")], "engines": {"a.b": DRY}}, "engines.'a.b': the name of an"),
    (
        {"steps": [step(engine="judge")], "engines": {"judge": SERVER}, "budget": GPU_HOURS},
        "budget.price_per_gpu_hour: does not apply to the server of engines.judge; set budget.price_per_million_tokens",
    ),
    ({"steps": [step()], "rollout": SOLVE}, "[rollout]: its function submits all generations of a"),
    (
        {"rollout": SOLVE, "scoring": {"extract": "number"}, **REASK},
        "retry.reask: has no effect with [rollout]",
    ),
]


OF_SCORING: list[tuple[dict[str, Any], str]] = [  # the table, and what follows its name
    ({"extract": {"regex": {"pattern": "("}}}, "extract.regex.pattern: '(' is not a valid regular"),
    ({"rules": [{}, {"extract": "regex"}]}, "rules.1.extract.regex.pattern: this key is missing"),
    ({"extract": {"number": {"last": True}}}, "extract.number.last: unknown key; known: none"),
    ({"extract": {"json": 1}}, "extract.json: found 1, expected table"),
    ({"extract": {"json": {}, "number": {}}}, 'extract: found {"json": {}, "number": {}}'),
    ({"scorers": [1]}, "scorers: found 1, expected a name, or a table { NAME = { PARAMETER ="),
    ({"scorers": "em"}, 'scorers: found "em", expected a list; write ["em"]'),
    ({"scorers": ["numeric", {"numeric": {}}]}, "scorers: has numeric twice; leave one out"),
    ({"scorers": ["em", {"numeric": {"tolerance": "1 %"}}]}, "scorers.numeric.tolerance: found "),
    ({"scorers": [{"judge": {"max_scor": 10}}]}, "scorers.judge.max_scor: …mean 'max_score'?"),
    ({"tolerance": 0.1}, "tolerance: …mean 'scoring.scorers.numeric.tolerance'?"),
]
WRONG += [({"scoring": scoring}, f"scoring.{found}") for scoring, found in OF_SCORING]


@pytest.mark.parametrize(("tables", "found"), WRONG)
def test_what_is_wrong_is_named(tables: dict[str, Any], found: str) -> None:
    start, _, end = found.partition("…")
    (line,) = problems(**tables)
    assert (line.startswith(start), line.endswith(end)) == (True, True), line


def test_all_problems_of_steps_come_at_once() -> None:
    bad = {"prompt": {"user": 3}, "sampling": {"max_tokens": 0}}
    found = problems(steps=[step(**bad), {"prompt": {"images": [1]}}])
    keys = ["draft.prompt.user", "draft.sampling.max_tokens", "1.name", "1.prompt.images.0"]
    assert [line.partition(":")[0] for line in found] == [f"steps.{key}" for key in keys]


# What a step is


def test_a_step_has_the_sampling_of_the_job_where_it_has_none_of_its_own() -> None:
    job = made(
        steps=[step(), step("b", sampling={"temperature": 0.0, "top_p": 0.5})],
        sampling={"temperature": 0.7, "max_tokens": 9, "top_k": 3},
    )
    draft, revise = (job.of_step(each).sampling.params() for each in job.steps)
    assert draft == {"temperature": 0.7, "max_tokens": 9, "top_k": 3}
    assert revise == {"temperature": 0.0, "max_tokens": 9, "top_k": 3, "top_p": 0.5}


@pytest.mark.parametrize("key", ["steps.b", "steps.1"])
def test_a_setting_reaches_one_step(key: str) -> None:
    job = made(f"{key}.sampling.temperature=1", f"{key}.when=1", steps=[step(), step("b")])
    assert [dict(each.sampling.params())["temperature"] for each in job.steps] == [0.0, 1.0]
    assert [each.when for each in job.steps] == [None, "1"]


def test_a_setting_reaches_a_named_engine() -> None:
    tables: dict[str, Any] = {"steps": [step(engine="judge")], "engines": {"judge": SERVER}}
    assert made("engines.judge.model=2024", **tables).engines["judge"].model == "2024"
    tried = made("engines.judge.kind=dry-run", **tables).engines["judge"]
    assert (tried.kind, tried.base_url) == ("dry-run", None)


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("steps.draf.when=1", "steps has no 'draf'; did you mean 'draft'?"),
        ("steps.7.when=1", "steps has no '7'; steps has draft"),
        ("steps.draft=1", "steps.draft is a table; name one of its keys"),
        ("steps.draft.when.x=1", "steps.draft.when is a single value and has no keys; set steps"),
    ],
)
def test_a_setting_that_reaches_no_step_is_refused(override: str, found: str) -> None:
    with pytest.raises(JobError, match=re.escape(f": {found}")):
        made(override, steps=[step(when="1")])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("scoring.extract.regex.pattern=1", {"extract": {"regex": {"pattern": "1"}}}),
        (
            'scoring.scorers=["em", { judge = { max_score = 5 } }, "numeric"]',
            {"scorers": ["em", {"judge": {"max_score": 5.0}}, {"numeric": {"tolerance": 0.01}}]},
        ),
    ],
)
def test_parameters_can_be_set_on_the_command_line(override: str, expected: dict[str, Any]) -> None:
    found = made(override).scoring
    assert found.model_dump(exclude_defaults=True) == expected
    assert made(scoring=found.model_dump()).scoring == found


# Paths


def test_files_of_steps_are_found_beside_the_job_file(folder: Path) -> None:
    files = {"system_file": "s.j2", "user_file": "u.j2", "tools": "t.json"}
    for name in files.values():
        (folder / name).write_text("[]")
    write_toml(steps=[{"name": "a", "prompt": files}])
    prompt = load_job(Path("job.toml")).steps[0].prompt
    assert prompt.model_dump(include={*files}) == {key: str(folder / files[key]) for key in files}


@pytest.mark.parametrize(
    ("function", "found"),
    [
        ("solve.py:go", "FOLDER/jobs/solve.py:go"),
        ("solve:go", "FOLDER/jobs/solve.py:go"),
        ("pkg.solve:go", "FOLDER/jobs/pkg/solve.py:go"),
        ("elsewhere.py:go", "FOLDER/elsewhere.py:go"),
        ("elsewhere:go", "FOLDER/elsewhere.py:go"),
        ("asyncio.tasks:sleep", "asyncio.tasks:sleep"),
    ],
)
def test_a_function_is_found_beside_the_job_file_first(
    folder: Path, function: str, found: str
) -> None:
    for name in ("jobs/solve.py", "solve.py", "jobs/pkg/solve.py", "elsewhere.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    write_toml(rollout={"function": function})
    Path("job.toml").rename("jobs/job.toml")
    rollout = load_job(Path("jobs/job.toml")).rollout
    assert rollout is not None
    assert rollout.function == found.replace("FOLDER", str(folder))


@pytest.mark.parametrize("function", ["solve.py:solve", "solve:solve"])
def test_a_function_imports_what_is_beside_it(folder: Path, function: str) -> None:
    helper = f"{folder.name}_helper".replace("-", "_")  # no other test has imported it
    (folder / f"{helper}.py").write_text("WORD = 'yes'")
    (folder / "solve.py").write_text(
        f"from {helper} import WORD\n"
        "async def solve(row, generate):\n"
        "    return f'{WORD} {(await generate(row[\"q\"])).text}'\n"
    )
    write_toml(rollout={"function": function})
    done = batchkit("run", "job.toml")
    assert done.exit_code == 0, done.stderr
    (record,) = map(json.loads, Path("output/a/results.jsonl").read_text().splitlines())
    assert record["text"].startswith("yes ")


# job.toml


@pytest.mark.usefixtures("folder")
def test_the_job_of_a_run_is_read_back_as_it_was() -> None:
    job = made(
        name="a",
        steps=[
            step(prompt={"user": "x", "texts": {"z": "a", "b": "c"}, "tools": [TOOL]}),
            step("b", sampling={"temperature": 0.0}, when="1", engine="judge", extract="number"),
            step("c", sampling={"structured_outputs": {"json": {"z": {}, "a": {}}}}),
        ],
        sampling={"temperature": 0.7},
        engines={"judge": {"model": "m", "options": {"z": 1, "a": {"y": 1, "b": 2}}}},
    )
    Path("a").mkdir()
    write_job(Path("a"), job)
    back = job_of_run(Path("a"))
    for table in ("steps", "engines", "sampling"):
        then, now = (json.dumps(each.model_dump()[table]) for each in (job, back))
        assert now == then
    for one, other in zip(job.steps, back.steps, strict=True):
        assert other.sampling.model_fields_set == one.sampling.model_fields_set
        assert back.of_step(other).sampling == job.of_step(one).sampling


@pytest.mark.usefixtures("folder")
def test_secrets_of_named_engines_are_masked_and_come_back() -> None:
    job = made(
        name="a",
        steps=[
            step("b", engine="auth", prompt={"user": f"Bearer {CANARY} is shown"}),
            step("c", engine="auth", when=f"{{{{ token={CANARY} }}}}"),
        ],
        engines={"auth": {"kind": "vllm", "model": "m", "options": {"hf_token": CANARY}}},
    )
    Path("a").mkdir()
    write_job(Path("a"), job)
    text = Path("a/job.toml").read_text()
    assert text.count(CANARY) == 2
    assert 'model = "m"' in text
    back = job_of_run(Path("a"))
    assert back.engines["auth"].options == {"hf_token": "***"}
    assert with_secrets_of(back, job).engines == job.engines
    assert masked(f"Bearer {CANARY}", "steps.draft.prompt.user") == f"Bearer {CANARY}"
