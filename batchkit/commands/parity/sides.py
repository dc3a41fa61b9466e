"""The two sides of ``parity``: two jobs with the same rows, prompts and greedy decoding, but different engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.loading import make_job, masked_override
from batchkit.config.seams import ENGINES
from batchkit.config.tables import (
    EngineTable,
    JobConfig,
    OutputTable,
    RetryTable,
    SamplingTable,
    ScoringTable,
)
from batchkit.engines.registry import sampling_names
from batchkit.errors import JobError

TOP_LOGPROBS = 5

# Options with the same meaning in vLLM and transformers. Other options of a job apply only to its engine kind.
MODEL_OPTIONS = (
    "max_model_len",
    "dtype",
    "max_num_seqs",
    "revision",
    "trust_remote_code",
    "chat_template",
    "mm_processor_kwargs",
)
_OPTIONS = {
    "vllm": MODEL_OPTIONS,
    "transformers": MODEL_OPTIONS,
    "openai-server": ("max_num_seqs", "max_model_len"),
    "dry-run": ("max_num_seqs",),
}
# A server loads the adapter and parses answers itself.
_NOT_OF_SERVER = ("lora", "loras", "reasoning_parser", "tool_call_parser")
# Keys of the other engines. Keys not named here describe a server.
_KEYS = ("kind", "model", "options", "in_process", *_NOT_OF_SERVER)
# Only OpenAI has this key. vLLM reports unknown names itself.
_NOT_VLLM = "reasoning_effort"
# Greedy decoding ignores these, or they are set here.
_CHOSEN = ("temperature", "n", "seed", "top_p", "top_k", "min_p", "logprobs")


class Greedy:
    """A function that makes a row's sampling parameters greedy, and leaves out those that one of the engine ``kinds``
    does not support. ``left_out``: their names. Threads that render rows add to it; it is read after they have
    ended."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._kinds = tuple(kinds)
        self.left_out: set[str] = set()

    def __call__(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, value in sampling.items():
            if name in _CHOSEN:
                continue
            if all(_knows(kind, name) for kind in self._kinds):
                kept[name] = value
            else:
                self.left_out.add(name)
        return {**kept, "temperature": 0.0, "logprobs": TOP_LOGPROBS}


class EngineSide(NamedTuple):
    """One side of the comparison. ``name``: a or b. ``left_out``: keys of the job that have no effect on this engine.
    Both sides share one ``greedy``."""

    name: str
    job: JobConfig
    left_out: Sequence[str]
    greedy: Greedy

    @property
    def kind(self) -> str:
        return self.job.engine.kind

    def __str__(self) -> str:
        return _side_name(self.name, self.kind)


def sides_of(
    job: JobConfig,
    engines: str,
    settings: tuple[Sequence[str], Sequence[str]],
    folder: Path,
) -> tuple[EngineSide, EngineSide]:
    """Return both sides, with a job for each engine. Their run folders are below ``folder``.

    Raises:
        JobError: Not two ``engines``, an unknown engine, or a setting that can't be used.
    """
    kinds = _kinds_in(engines)
    greedy = Greedy(kinds)
    sampling = SamplingTable(
        **greedy(job.sampling.params()), sampling_column=job.sampling.sampling_column
    )
    common = job.model_copy(
        update={
            "sampling": sampling,
            "output": OutputTable(dir=str(folder)),
            "scoring": ScoringTable(),
            # A retry would change the prompt, for example by using fewer pixels.
            "retry": RetryTable(attempts=1, on_too_long=job.retry.on_too_long),
            "run": job.run.of_part(workers=None, max_seconds=None, max_completion_tokens=None),
        }
    )
    first, second = (
        _side(name, kind, common, own, greedy)
        for name, kind, own in zip("ab", kinds, settings, strict=True)
    )
    return first, second


def _side(
    name: str, kind: str, job: JobConfig, settings: Sequence[str], greedy: Greedy
) -> EngineSide:
    for setting in settings:
        if problem := _problem_with(setting):
            raise JobError(f"--set-{name} {masked_override(setting)}: {problem}")
    table, left_out = _table_for(kind, job.engine)
    engine = make_job({"engine": table}, _side_name(name, kind), settings).engine
    return EngineSide(
        name, job.model_copy(update={"engine": engine, "name": name}), left_out, greedy
    )


def _problem_with(setting: str) -> str:
    key, equals, _ = setting.partition("=")
    if not equals:
        return "write KEY=VALUE, as engine.model=PATH"
    if key.strip() == "engine.kind":
        return "--engines says which kinds are compared"
    if not key.strip().startswith("engine."):
        return (
            "only engine.… may differ between the sides; rows, prompts and sampling are the same for both"
            " (--set)"
        )
    return ""


def _table_for(kind: str, engine: EngineTable) -> tuple[dict[str, Any], list[str]]:
    """Return the table ``[engine]`` for an engine of ``kind``, and the keys that were left out because this kind does
    not have them."""
    given = engine.model_dump(exclude_unset=True)
    known = given.keys() - {*_NOT_OF_SERVER} if kind == "openai-server" else {*_KEYS}
    table: dict[str, Any] = {key: given[key] for key in given if key in known} | {"kind": kind}
    left_out = [f"engine.{key}" for key in given if key not in known]
    if kind != engine.kind:
        shared = _OPTIONS.get(kind, ())
        left_out += [f"engine.options.{name}" for name in engine.options if name not in shared]
        table["options"] = {n: value for n, value in engine.options.items() if n in shared}
    return table, left_out


def _kinds_in(engines: str) -> tuple[str, str]:
    kinds = [kind.strip() for kind in engines.split(",")]
    if len(kinds) != 2 or not all(kinds):
        raise JobError(
            f"--engines {engines}: expected two, as vllm,transformers; the same one twice with"
            " --set-a or --set-b"
        )
    try:
        return ENGINES.check(kinds[0]), ENGINES.check(kinds[1])
    except ValueError as error:
        raise JobError(f"--engines {engines}: {error}") from None


def _knows(kind: str, name: str) -> bool:
    if kind == "vllm":
        return name != _NOT_VLLM
    names = sampling_names(kind)
    return names is None or name in names


def _side_name(name: str, kind: str) -> str:
    return f"side {name} ({kind})"
