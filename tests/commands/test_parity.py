"""Two engines side by side: real ones on tiny models, alike and not, and every report."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from PIL import Image

from batchkit.commands.parity import parity
from batchkit.commands.parity.differences import SideAnswer, Token, difference
from batchkit.commands.parity.findings import ParityResult
from batchkit.commands.parity.sides import MODEL_OPTIONS, sides_of
from batchkit.config.loading import load_job
from batchkit.config.tables import JobConfig
from batchkit.engines.registry import open_preflight
from batchkit.errors import EngineError, InputError, JobError
from tests.support.chat_server import MODEL, ChatServer, Refused, serving
from tests.support.command_line import batchkit
from tests.support.own_process import begin
from tests.support.rows import write_jsonl
from tests.support.small_vllm import SMALL, TEXT_ONLY

pytestmark = pytest.mark.vllm

N_ROWS, TIE = 32, 0.01
Make = Callable[..., JobConfig]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A job for ``model`` or the dry-run engine, in ``job.toml``, with rows and perhaps an image each."""
    monkeypatch.chdir(tmp_path)

    def make(
        model: Path | str | None = None,
        *overrides: str,
        images: bool = False,
        options: dict[str, Any] | None = None,
    ) -> JobConfig:
        rows = [
            {"id": f"q{n}", "q": f"question {n} " + "about tea " * (n * 7 % 20)}
            for n in range(N_ROWS)
        ]
        for n, row in enumerate(rows if images else ()):
            image = Image.new("RGB", (128 + 32 * (n % 5), 96 + 32 * (n % 3)), (n * 8, 80, 140))
            image.paste((255, 255, 255 - n), (10 + n, 10, 60 + n, 50))
            row["file"] = f"{n}.png"
            image.save(row["file"])
        write_jsonl(Path("rows.jsonl"), rows)
        job = {
            "name": "trial",
            "input": {"path": "rows.jsonl", "id": "id"},
            "prompt": {"user": "{{ q }}"} | ({"images": ["{{ file }}"]} if images else {}),
            "engine": {"model": str(model)} if model else {"kind": "dry-run"},
            "sampling": {"max_tokens": 24, "temperature": 0.8},
        }
        job["engine"]["options"] = options or {}
        Path("job.toml").write_text(tomlkit.dumps(job))
        return load_job(Path("job.toml"), overrides)

    return make


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def of_server(server: ChatServer, *more: str) -> list[str]:
    keys = "kind=openai-server", f"base_url={server.url}", f"model={MODEL}"
    return [*(f"engine.{key}" for key in keys), *more]


def compare(
    job: JobConfig, engines: str, *only_b: str, only_a: Sequence[str] = (), rows: int = 100
) -> ParityResult:
    return parity(job, engines, rows=rows, tie=TIE, settings=(only_a, only_b))


# Real engines


@pytest.mark.parametrize(
    "images",
    [
        pytest.param(False, id="text"),
        pytest.param(True, id="images", marks=pytest.mark.release),
    ],
)
def test_two_engines_answer_alike(
    make: Make, text_model: Path, demo_model: Path, images: bool
) -> None:
    """The first time each in a process of its own."""
    model, options = (demo_model, SMALL) if images else (text_model, TEXT_ONLY)
    in_process = f"engine.in_process={str(images).lower()}"
    found = compare(make(model, in_process, images=images, options=options), "vllm,transformers")

    assert found.rows == found.answered == N_ROWS
    assert found.equal >= N_ROWS - 1, found.to_text()
    assert found.ties == len(found.differences), found.to_text()
    assert found.exit_code == 0
    assert [one.side.kind for one in found.sides] == ["vllm", "transformers"]
    assert found.sides[0].left_out == []
    assert "engine.options.kv_cache_memory_bytes" in found.sides[1].left_out
    assert "engine.options.max_model_len" not in found.sides[1].left_out
    assert not Path("output").exists()


def damaged(model: Path, to: Path) -> Path:
    """A copy with noise on its weights, about as much as a careless quantisation makes."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, to)
    weights = load_file(to / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if weight.dim() == 2:
            drawn = torch.randn(weight.shape, generator=noise)
            weights[name] = weight + 0.01 * weight.std() * drawn
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.release
def test_a_damaged_model_is_found(make: Make, text_model: Path, tmp_path: Path) -> None:
    model = damaged(text_model, tmp_path / "damaged")
    make(text_model, options=TEXT_ONLY)
    before = {path.name for path in tmp_path.iterdir()}

    args = ["--engines", "vllm,vllm", "--set-b", f"engine.model={model}", "--json"]
    done = batchkit("parity", "job.toml", "--set", "engine.in_process=true", *args)

    assert done.exit_code == 3, done.stderr
    found = json.loads(done.stdout)
    assert {path.name for path in tmp_path.iterdir()} == before, "no run folder, no log"
    assert found["rows"] == N_ROWS == found["equal"] + found["differ"]
    assert found["differ"] == len(found["differences"]) > found["ties"]
    assert found["share_equal"] == found["equal"] / N_ROWS
    assert found["failed"] == {"a": 0, "b": 0}
    gaps = [each["gap"] for each in found["differences"]]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 10 * TIE
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(text_model)
    for each in found["differences"]:
        a, b = each["a"], each["b"]
        assert a["text"] != b["text"]
        begins = next(n for n in range(500) if a["text"][: n + 1] != b["text"][: n + 1])
        assert abs(len(tokenizer.encode(a["text"][:begins])) - each["position"]) <= 1
        assert a["token"] != b["token"]
        for own in (a, b):
            assert own["prompt_tokens"] > 0 >= own["logprob"]
            assert own["other_logprob"] is None or own["other_logprob"] <= own["logprob"]
        assert each["unit"] == "token"
        if not each["gap_is_least"]:
            own_gaps = [own["logprob"] - own["other_logprob"] for own in (a, b)]
            assert each["gap"] == pytest.approx(max(own_gaps))


def test_a_row_that_fails_on_one_side_is_reported(
    make: Make, text_model: Path, scratch: Path
) -> None:
    job = make(text_model, "engine.kind=transformers", "input.limit=12")
    # Of the first twelve, prompts of 3 to 43 tokens.
    found = compare(job, "transformers,transformers", "engine.options.max_model_len=40")

    too_long = [each.index for each in found.failures]
    assert too_long
    assert {each.side for each in found.failures} == {"b"}
    assert {each.kind for each in found.failures} == {"prompt_too_long"}
    assert found.exit_code == 3
    assert found.to_json()["failed"] == {"a": 0, "b": len(too_long)}
    assert f"failed on b alone: row {too_long[0]} (id q{too_long[0]}): prompt_too_long" in (
        found.to_text()
    )
    assert found.answered == 12 - len(too_long)
    assert not list(scratch.glob("batchkit*"))


def test_prompts_that_are_not_the_same_are_reported(make: Make, text_model: Path) -> None:
    overrides = ["engine.kind=transformers", "engine.in_process=true", "input.limit=12"]
    cut = ["retry.on_too_long=truncate-middle", "sampling.max_tokens=8"]
    job = make(text_model, *overrides, *cut)
    found = compare(job, "transformers,transformers", "engine.options.max_model_len=40")

    assert not found.failures
    assert found.exit_code == 3
    changed = [each for each in found.differences if each.has_other_prompt]
    assert changed
    assert f"{len(changed)} of those had prompts of different lengths" in found.to_text()


def test_a_side_that_cannot_start_is_named_and_its_log_kept(
    make: Make, text_model: Path, tmp_path: Path, scratch: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(text_model, broken)
    (broken / "model.safetensors").write_bytes(b"none")
    with pytest.raises(EngineError, match=r"^side b \(transformers\): ") as raised:
        compare(make(), "dry-run,transformers", f"engine.model={broken}")

    (log,) = scratch.glob("batchkit-parity-*/b/engine.log")
    assert str(log) in str(raised.value)


# What is asked


def test_rows_are_greedy_whatever_the_job_says(make: Make) -> None:
    sampling = {"temperature": 1.5, "n": 3, "top_p": 0.5, "min_tokens": 2, "stop": ["."]}
    with serving() as server:
        given = ["sampling.seed=3", "sampling.sampling_column=own", "retry.temperatures=[0.9]"]
        job = make(None, *of_server(server, *given))
        rows = [{"id": "x", "q": "tea"}, {"id": "y", "q": "milk", "own": sampling}]
        write_jsonl(Path("rows.jsonl"), rows)
        found = compare(job, "openai-server,openai-server")
        bodies = {
            body["messages"][0]["content"]: {k: v for k, v in body.items() if k != "messages"}
            for body in server.bodies
            if body["messages"][0]["content"] in ("tea", "milk")
        }
    assert found.exit_code == 0
    assert found.sides[0].left_out == []
    greedy = {"model": MODEL, "temperature": 0.0, "logprobs": True, "top_logprobs": 5}
    assert bodies["tea"] == {**greedy, "max_tokens": 24}
    assert bodies["milk"] == {**greedy, "max_tokens": 24, "min_tokens": 2, "stop": ["."]}


def test_sampling_that_one_side_does_not_know_is_left_out_for_both(make: Make) -> None:
    job = make(None, 'sampling.structured_outputs={choice=["yes","no"]}')
    sides = sides_of(job, "dry-run,transformers", ((), ("engine.model=tiny",)), Path("/nowhere"))
    assert all("structured_outputs" not in side.job.sampling.params() for side in sides)
    assert sides[0].greedy.left_out == {"structured_outputs"}
    both = sides_of(job, "dry-run,vllm", ((), ("engine.model=tiny",)), Path("/nowhere"))
    assert all("structured_outputs" in side.job.sampling.params() for side in both)


def test_options_of_the_job_go_over_to_an_engine_that_knows_them(
    make: Make, text_model: Path
) -> None:
    options = {"max_model_len": 256, "dtype": "float32", "max_num_seqs": 4, "block_size": 32}
    job = make(text_model, options=options)

    def options_for(engines: str, *only_b: str) -> Any:
        side = sides_of(job, engines, ((), only_b), Path("/nowhere"))[1]
        return side.job.engine.options, side.left_out

    shared = {name: options[name] for name in ("max_model_len", "dtype", "max_num_seqs")}
    assert options_for("vllm,vllm") == (options, [])
    assert options_for("vllm,transformers") == (shared, ["engine.options.block_size"])
    own = options_for("vllm,transformers", "engine.options.attn_implementation=eager")[0]
    assert own == {**shared, "attn_implementation": "eager"}
    address = "engine.base_url=http://localhost:1/v1"
    seen_by_all = {"max_model_len": 256, "max_num_seqs": 4}
    assert options_for("vllm,openai-server", address)[0] == seen_by_all


def test_keys_of_a_server_stay_with_it(make: Make) -> None:
    server = ["engine.kind=openai-server", "engine.base_url=http://a/v1", "engine.model=m"]
    job = make(None, *server, options={"drop": ["seed"]})
    one, two = sides_of(job, "openai-server,vllm", ((), ("engine.lora=x",)), Path("/nowhere"))
    assert (one.job.engine, one.left_out) == (job.engine, [])
    assert (two.job.engine.base_url, two.job.engine.lora) == (None, "x")
    assert two.left_out == ["engine.base_url", "engine.options.drop"]

    own = {"engine.lora": "x", "engine.reasoning_parser": "qwen3"}
    job = make("m", *(f"{key}={value}" for key, value in own.items()))
    one, two = sides_of(job, "vllm,openai-server", ((), server[1:2]), Path("/nowhere"))
    assert (one.left_out, set(two.left_out)) == ([], set(own))


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_what_goes_over_is_known_to_both(kind: str, text_model: Path) -> None:
    """And of sampling, whatever stays for transformers: its own refusal would say what is wrong."""
    values = {
        "max_model_len": 256,
        "dtype": "float32",
        "max_num_seqs": 4,
        "revision": "main",
        "trust_remote_code": False,
        "chat_template": "{{ messages }}",
        "mm_processor_kwargs": {},
    }
    sampling = {
        "max_tokens": 4,
        "min_tokens": 1,
        "stop": ["."],
        "stop_token_ids": [1],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"1": 1.0},
        "allowed_token_ids": [1, 2],
    }
    assert set(values) == set(MODEL_OPTIONS)
    job = JobConfig(
        engine={"kind": kind, "model": str(text_model), "options": values}, sampling=sampling
    )
    one, two = sides_of(job, f"transformers,{kind}", ((), ()), Path("/nowhere"))
    assert not one.greedy.left_out
    assert set(two.job.sampling.params()) - {"temperature", "logprobs"} == set(sampling)
    open_preflight(two.job)


@pytest.mark.parametrize(
    ("engines", "only_b", "message"),
    [
        ("vllm", (), "--engines vllm: expected two, as vllm,transformers"),
        ("vllm,", (), "--engines vllm,: expected two"),
        ("vllm,vllm,vllm", (), "expected two"),
        ("vlm,transformers", (), '--engines vlm,transformers: found "vlm", expected "vllm"'),
        ("dry-run,dry-run", ("sampling.n=1",), "--set-b sampling.n=1: only engine.… may differ"),
        ("dry-run,dry-run", ("engine.kind=vllm",), "--engines says which kinds"),
        ("dry-run,dry-run", ("engine.model",), "--set-b engine.model: write KEY=VALUE"),
        ("dry-run,dry-run", ("engine.modl=x",), "side b (dry-run): 1 problem\n  engine.modl: unk"),
        ("dry-run,transformers", (), "side b (transformers): 1 problem\n  engine: model is miss"),
        (
            "dry-run,transformers",
            ("engine.model=./nowhere",),
            "side b (transformers): engine.model: no folder ./nowhere",
        ),
        (
            "dry-run,dry-run",
            ("engine.options.latency=1",),
            'side b (dry-run): engine.options.latency: kind = "dry-run" has no such name',
        ),
    ],
)
def test_what_can_not_be_compared_is_refused_by_side_and_key(
    make: Make, engines: str, only_b: tuple[str, ...], message: str
) -> None:
    job = make()
    with pytest.raises(JobError, match='task = "classify": parity compares generated texts'):
        compare(job.model_copy(update={"task": "classify"}), engines)
    with pytest.raises(JobError) as raised:
        compare(job, engines, *only_b)
    assert message in str(raised.value)
    with pytest.raises(JobError, match=r"^side a \(dry-run\): engine\.options\.latency"):
        compare(job, "dry-run,dry-run", only_a=("engine.options.latency=1",))


@pytest.mark.parametrize("rows", [N_ROWS - 1, N_ROWS, N_ROWS + 1])
def test_sides_that_got_different_rows_are_not_compared(make: Make, rows: int) -> None:
    job = make()

    def change(text: str) -> None:
        if text.startswith("side a") and "rows in" in text:
            others = ({"id": f"q{n}", "q": f"another {n}"} for n in range(rows))
            write_jsonl(Path(job.input.path or ""), others)

    with pytest.raises(InputError, match="changed after side a"):
        parity(job, "dry-run,dry-run", rows=100, tie=TIE, say=change)


# What is reported


def test_an_engine_equals_itself(make: Make) -> None:
    make()
    done = batchkit("parity", "job.toml", "--engines", "dry-run,dry-run")
    assert done.exit_code == 0, done.stderr
    assert f"equal: {N_ROWS} of {N_ROWS} rows that both answered (100.0%)" in done.stdout
    assert "differ" not in done.stdout
    assert not Path("output").exists()


def test_only_the_first_rows_are_asked(make: Make) -> None:
    assert compare(make(), "dry-run,dry-run", rows=5).rows == 5
    assert compare(make(None, "input.limit=3"), "dry-run,dry-run", rows=5).rows == 3
    with pytest.raises(JobError, match=r"no row has what input\.where asks for"):
        compare(make(None, 'input.where={id="nobody"}'), "dry-run,dry-run")


def test_a_row_that_fails_on_both_sides_is_no_difference(make: Make) -> None:
    job = make()
    write_jsonl(Path("rows.jsonl"), [{"id": "x", "q": "tea"}, {"id": "y"}])
    found = compare(job, "dry-run,dry-run")
    assert (found.equal, found.failed_on_both, found.exit_code) == (1, 1, 0)
    assert "failed on both sides: 1" in found.to_text()
    write_jsonl(Path("rows.jsonl"), [{"id": "y"}])
    found = compare(job, "dry-run,dry-run")
    assert (found.failed_on_both, found.exit_code) == (1, 3), "nothing was compared"
    assert "nothing was compared" in found.to_text()
    assert found.to_json()["share_equal"] is None


def test_servers_are_compared_by_their_tokens(make: Make) -> None:
    """Theirs all have the logprob -0.5, and of others only "x" is known, at -2.0."""

    def other(text: str, body: Any) -> str:
        return "one two four" if "question 7 " in text else "one two three"

    with serving(lambda text, body: "one two three") as one, serving(other) as two:
        job = make(None, *of_server(one))
        found = compare(job, "openai-server,openai-server", f"engine.base_url={two.url}")
    (each,) = found.differences
    assert (each.index, each.id, each.position, each.unit) == (7, "q7", 2, "token")
    assert (each.a.token, each.b.token) == ("three", "four")
    assert (each.gap, each.gap_is_least) == (1.5, True)
    assert (found.equal, found.ties, found.exit_code) == (N_ROWS - 1, 0, 3)
    text = found.to_text()
    assert "row 7 (id q7), token 2, gap 1.5000 or more" in text
    assert 'a: "three" -0.5000, the other not among its likeliest: one two three [stop]' in text


def test_reasoning_and_tool_calls_are_compared(make: Make) -> None:
    def answer(reasoning: str, arguments: str) -> Any:
        call = {"id": reasoning, "function": {"name": "f", "arguments": arguments}}
        message = {"content": None, "reasoning": reasoning, "tool_calls": [call]}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}

    def one(text: str, body: Any) -> None:
        raise Refused(200, answer("a", "{}"))

    def two(text: str, body: Any) -> None:
        is_other = "question 7 " in text, "question 8 " in text
        raise Refused(200, answer("ab"[is_other[0]], "{}" if not is_other[1] else "[]"))

    with serving(one) as first, serving(two) as second:
        job = make(None, *of_server(first))
        found = compare(job, "openai-server,openai-server", f"engine.base_url={second.url}")
    assert sorted(each.index for each in found.differences) == [7, 8]


def test_without_logprobs_words_are_compared(make: Make) -> None:
    with serving(lambda text, body: "dry-run: no model says this") as server:
        job, settings = make(None, "sampling.extra_args={x=1}"), of_server(server)[1:]
        found = compare(job, "dry-run,openai-server", *settings, rows=2)
    parts = [(each.position, each.unit, each.gap) for each in found.differences]
    assert parts == [(3, "word", None)] * 2
    assert found.ties == 0
    assert found.exit_code == 3
    assert "the gaps are unknown" in found.to_text()
    assert [side.left_out for side in found.sides] == [["sampling.extra_args"]] * 2


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_nothing(
    make: Make, scratch: Path, signum: signal.Signals
) -> None:
    make(options={"latency_s": 60})
    args = ("parity", "job.toml", "--engines", "dry-run,dry-run")
    running = begin(*args, cwd=Path.cwd(), TMPDIR=str(scratch))
    assert running.stderr is not None
    assert "starting the engine" in running.stderr.readline()
    assert list(scratch.glob("batchkit-parity-*"))
    running.send_signal(signum)
    assert running.wait(20) == 128 + signum
    assert "nothing is kept" in running.stderr.read()
    assert not list(scratch.iterdir())


# Where answers part


def answer(*tokens: Token, text: str | None = None, finish_reason: str = "stop") -> SideAnswer:
    written = "".join(token.text for token in tokens) if text is None else text
    return SideAnswer(written, finish_reason, tokens)


def token(text: str, logprob: float = -0.1, **others: float) -> Token:
    return Token(text, logprob, {text: logprob, **others})


PARTS = {
    "a gap near zero is a tie": (
        answer(token("a"), token("b", -0.690, c=-0.694)),
        answer(token("a"), token("c", -0.691, b=-0.692)),
        *(1, 0.004, False, True),
    ),
    "the more certain side decides": (
        answer(token("b", -0.7, c=-0.701)),
        answer(token("c", -0.1, b=-3.1)),
        *(0, 3.0, False, False),
    ),
    "a token that is not among the likeliest is no tie": (
        answer(token("b", -0.7, x=-0.702)),
        answer(token("c", -0.7, b=-0.7)),
        *(0, 0.002, True, False),
    ),
    "pieces of a character": (  # vLLM gives nothing for the first pieces and the whole for the last
        answer(token("a"), token(""), token("é"), token("b"), text="aéb"),
        answer(token("a"), token("\ufffd"), token("\ufffd"), token("c"), text="aéc"),
        *(3, 0.0, True, False),
    ),
    "an answer that ends sooner": (
        answer(token("a")),
        answer(token("a"), token("b")),
        *(1, None, False, False),
    ),
    "the same text with another end": (
        answer(token("a")),
        answer(token("a"), finish_reason="length"),
        *(1, None, False, False),
    ),
    "an empty answer": (answer(text=""), answer(token("a")), *(0, None, False, False)),
}


@pytest.mark.parametrize(
    ("a", "b", "position", "gap", "is_least", "is_tie"), PARTS.values(), ids=PARTS
)
def test_where_answers_part(
    a: SideAnswer,
    b: SideAnswer,
    position: int,
    gap: float | None,
    is_least: bool,
    is_tie: bool,
) -> None:
    found = difference(0, "q", a, b)
    assert found is not None
    assert difference(0, "q", a, a) is difference(0, "q", b, b) is None
    assert (found.position, found.unit) == (position, "token")
    assert found.gap == (None if gap is None else pytest.approx(gap))
    assert (found.gap_is_least, found.is_tie(TIE)) == (is_least, is_tie)
    assert not found.is_tie(0.003)
