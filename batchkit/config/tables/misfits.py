"""Checks for contradictions: keys of a job that are valid alone, but not together with other keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from batchkit.config.answer_schema import faults_in
from batchkit.config.problems import AT_THE_TOP
from batchkit.config.seams import ScorerName, is_deferred
from batchkit.config.suggest import called_here, did_you_mean
from batchkit.config.tables.engine import SamplingTable
from batchkit.config.tables.parameters import Parameters
from batchkit.config.tables.prompt import PromptTable
from batchkit.config.tables.scoring import ScoringTable
from batchkit.config.tables.steps import StepTable
from batchkit.config.tables.task import FOR_VECTORS, OF_TOKENS, WITH_VECTORS, SpeechTable
from batchkit.config.tool_definitions import why_not_forced

if TYPE_CHECKING:
    from batchkit.config.tables.job import JobConfig

_NAME_OF_ENGINE = re.compile(r"[A-Za-z0-9_-]+")
_OF_PROMPT = (
    *("system", "system_file", "user", "user_file", "images", "videos", "audios", "chat"),
    "chat_template_kwargs",
)


def misfits(job: JobConfig) -> list[str]:
    """Return one message per key of ``job`` that contradicts other keys. The rules run in order. The first rule that
    finds a problem ends the search, because later rules rely on the checks of earlier ones."""
    rules = (
        _misfits_of_task,
        _misfits_of_steps,
        _misfits_of_each_step,
        _misfits_of_scoring,
        _misfits_of_retry,
        _misfits_of_engines,
    )
    return next(filter(None, ([*rule(job)] for rule in rules)), [])


def _misfits_of_task(job: JobConfig) -> Iterator[str]:
    """Yield a message for each key that does not fit the task."""
    task, pair, pooling = job.task, job.pair, job.pooling
    if "npy" in job.output.export and task not in WITH_VECTORS:
        yield f'output.export: "npy" is for {FOR_VECTORS}, but task is "{task}"'
    if task != "score" and pair.is_set:
        yield f'[pair]: is for task = "score", but task is "{task}"'
    if task != "transcribe" and job.speech != SpeechTable():
        yield f'[speech]: is for task = "transcribe", but task is "{task}"'
    if job.generates:
        if pooling.params():
            yield f'[pooling]: is for pooling tasks; put the parameters of task = "{task}" into [sampling]'
        if task == "transcribe":
            yield from _misfits_of_speech(job)
        return
    if job.engine.kind == "transformers":
        yield f'engine.kind: "transformers" does not support the task "{task}"; use "vllm" or a server'
    for key, is_set in _generation_keys(job):
        if is_set:
            yield f'{key}: is for task = "generate", whose answer is text, but task is "{task}", so leave it out'
    if task in OF_TOKENS and job.engine.kind == "openai-server":
        yield f'engine.kind: "openai-server" does not support the task "{task}"; use "vllm"'
    if task not in ("embed", "token_embed") and pooling.dimensions is not None:
        yield f'pooling.dimensions: is for task = "embed" or "token_embed", but task is "{task}"'
    if task == "score":
        yield from _misfits_of_score(job)
    elif not job.prompt.chat and (job.prompt.system or job.prompt.system_file):
        yield f"prompt.system: task {task} sends only prompt.user, unless prompt.chat = true"


def _misfits_of_speech(job: JobConfig) -> Iterator[str]:
    if job.engine.kind == "transformers":
        yield 'engine.kind: "transformers" does not support the task "transcribe"; use "vllm" or a server'
    if (found := len(job.prompt.audios)) > 1:
        yield f'prompt.audios: has {found} templates, but task = "transcribe" reads one recording per row; keep one'
    for key, is_set in _generation_keys(job):
        if is_set and key not in ("[sampling]", "[scoring]", "retry.temperatures"):
            yield f'{key}: is for task = "generate", but task is "transcribe", so leave it out'
    for name in _OF_PROMPT:
        if name not in ("audios", "chat") and getattr(job.prompt, name):
            yield f'prompt.{name}: task = "transcribe" reads only prompt.audios; use speech.prompt for preceding text'
    if job.params().get("n", 1) != 1:
        yield 'sampling.n: a recording has one transcript; task = "transcribe" needs n = 1'
    if job.speech.overlap_seconds * 4 > job.speech.part_seconds:
        yield "speech.overlap_seconds: is more than a quarter of speech.part_seconds; lower it"


def _generation_keys(job: JobConfig) -> Iterator[tuple[str, bool]]:
    """Yield each key that only applies to tasks that generate text, and whether ``job`` sets it."""
    yield "[[steps]]", bool(job.steps)
    yield "[rollout]", job.rollout is not None
    yield "[select]", job.select.by is not None
    yield "[sampling]", job.sampling != SamplingTable()
    yield "prompt.tools", job.prompt.tools is not None
    yield "prompt.lora", job.prompt.lora is not None
    yield "output.parse", job.output.parse is not None
    yield "retry.reask", job.retry.reask > 0
    yield "retry.temperatures", job.retry.temperatures is not None
    yield "[scoring]", job.scoring.is_on and job.task != "classify"


def _misfits_of_score(job: JobConfig) -> Iterator[str]:
    pair, prompt = job.pair, job.prompt
    # Lines of a batch file bring their own texts.
    is_set = pair.is_set or not job.input.may_be_batch
    if is_set and pair.query is None and not pair.query_images:
        yield 'pair.query: is missing: task = "score" compares it with pair.documents'
    if is_set and pair.documents is None and not pair.document_images:
        yield 'pair.documents: is missing: task = "score" compares them with pair.query'
    for name in _OF_PROMPT:
        if getattr(prompt, name):
            yield f'prompt.{name}: task = "score" reads pair.query and pair.documents; leave prompt.{name} out'


def _misfits_of_steps(job: JobConfig) -> Iterator[str]:
    """Yield a message for each key that does not fit the job's steps, rollout or selection."""
    names = [step.name for step in job.steps]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"steps: two steps are named {name!r}; give each step its own name"
    several = "[[steps]]" if job.steps else "[rollout]" if job.rollout is not None else None
    if job.steps and job.rollout is not None:
        yield "[rollout]: its function submits all generations of a row, so leave [[steps]] out"
    if several is not None:
        for name, field in PromptTable.model_fields.items():
            if getattr(job.prompt, name) != field.default and name != "chat_template_kwargs":
                yield f"prompt.{name}: leave it out, because {several} has its own prompts"
        if job.output.parse is not None:
            remedy = "set parse in a step" if job.steps else "parse the JSON in the function"
            yield f"output.parse: has no effect with {several}; leave it out, and {remedy}"
    if job.rollout is not None:
        yield from _misfits_of_rollout(job)
    for place, step in enumerate(job.steps):
        yield from _misfits_of_step(job, step, is_first=place == 0)
    for name in job.engines:
        if not _NAME_OF_ENGINE.fullmatch(name):
            yield f"engines.{name!r}: the name of an engine may only have letters, digits, - and _"
    if job.steps and not any(step.answer for step in job.steps):
        yield "steps: all steps have answer = false, but one step must give the row's answer"
    used = {step.engine for step in job.steps} - {""}
    # A rollout's function names its engines only at run time, so they can't be checked.
    if job.rollout is None and used <= job.engines.keys():
        for name in job.engines.keys() - used:
            yield f"engines.{name}: no step uses it; set engine = {name!r} in a step, or leave it out"
    if job.steps and "steps" in job.vars:
        yield "vars.steps: 'steps' is the name of the earlier steps' results; choose another name"
    yield from _misfits_of_select(job)


def _misfits_of_rollout(job: JobConfig) -> Iterator[str]:
    """Yield a message for each key that has no effect with a rollout, because the rollout's function controls its
    requests itself."""
    of_function = {
        "retry.reask": job.retry.reask > 0,
        'retry.on_too_long = "truncate-middle"': job.retry.on_too_long == "truncate-middle",
        "sampling.sampling_column": job.sampling.sampling_column is not None,
        "a template in [sampling]": bool(job.sampling.templates),
        "[select]": job.select.by is not None,
    }
    for key, is_set in of_function.items():
        if is_set:
            yield f"{key}: has no effect with [rollout]; leave it out, and do this in the function"


def _misfits_of_step(job: JobConfig, step: StepTable, *, is_first: bool) -> Iterator[str]:
    key, prompt = f"steps.{step.name}", step.prompt
    if hasattr(dict, step.name):
        yield f"{key}: templates can't read steps.{step.name}, which is a method of dict; choose another name"
    for name in filter(is_deferred, step.scorers or ()):
        yield f"{key}.scorers: {name} is computed after the run; put it into scoring.scorers"
    if step.engine and step.engine not in job.engines:
        known = f"expected one of [engines]: {', '.join(job.engines)}"
        known = known if job.engines else f"but there are no engines; add [engines.{step.engine}]"
        hint = did_you_mean(step.engine, job.engines)
        yield f"{key}.engine: found {step.engine!r}, {known}{hint}"
    has_prompt = prompt.user is not None or prompt.user_file is not None
    has_prompt = has_prompt or prompt.has_media
    if not is_first and not has_prompt:
        yield f"{key}.prompt: has no user, user_file or images; set one (only the first step may lack them)"


def _misfits_of_select(job: JobConfig) -> Iterator[str]:
    select = job.select
    if select.by is None:
        if select.scorer is not None or select.step is not None:
            yield 'select.by: is missing; set it to "majority", "scorer" or "step"'
        return
    for name in ("scorer", "step"):
        if select.by != name and getattr(select, name) is not None:
            yield f'select.{name}: is for select.by = "{name}", but select.by is "{select.by}"; leave it out'
    judged = [*map(job.of_step, job.steps[:-1] if select.by == "step" else job.steps)] or [job]
    if not any(map(_may_have_several, judged)):
        where = " in each step" * bool(job.steps)
        yield f"sampling.n: is 1{where}, but [select] chooses among several answers; set n to 2 or more"
    if select.by == "step":
        yield from _misfits_of_judge(job)
        return
    for place, table in dict(_scoring_for_select(job)).items():
        if select.by == "majority" and not {"extract", "choices"} & table.model_fields_set:
            yield f'select.by: "majority" counts predictions: set {place}.extract or {place}.choices'
        if select.by == "scorer" and job.steps and table.reference == "steps":
            yield f"{place}.reference: 'steps' is the name of the earlier steps' results; rename that field"
        if select.by == "scorer":
            yield from _misfits_of_scorer(select.scorer, table.scorers, f"{place}.scorers")


def _scoring_for_select(job: JobConfig) -> Iterator[tuple[str, ScoringTable]]:
    """Yield (name of the table, scoring settings) that ``[select]`` uses, for each generation with several answers."""
    if not job.steps:
        yield "scoring", job.scoring
    for step in job.steps:
        if _may_have_several(job.of_step(step)):
            own = f"steps.{step.name}", step.scoring
            yield own if step.has_scoring else ("scoring", job.scoring)


def _may_have_several(job: JobConfig) -> bool:
    """Return True if a request may have ``n`` over 1. ``n`` comes from the job, from the row's own parameters, or, if
    the row is a request body, from this body."""
    is_body = not (job.prompt.user or job.prompt.user_file)
    has_own = is_body or job.sampling.sampling_column is not None or "n" in job.sampling.templates
    return has_own or job.params().get("n", 1) != 1


def _misfits_of_scorer(name: ScorerName | None, scorers: Parameters, place: str) -> Iterator[str]:
    known = [scorer for scorer in scorers if not is_deferred(scorer)]
    if name is None and len(scorers) != 1:
        remedy = "set select.scorer to one of them" if scorers else f"add one to {place}"
        yield f"select.scorer: is missing; {place} has {len(scorers)} scorers: {remedy}"
    elif (chosen := name or next(iter(scorers))) not in known:
        yield (
            f"select.scorer: found {chosen!r}, expected one of {place} that is computed during the run:"
            f" {', '.join(known) or 'there is none'}"
        )


def _misfits_of_judge(job: JobConfig) -> Iterator[str]:
    if len(job.steps) < 2 or job.select.step != job.steps[-1].name:
        last = f"the last of the [[steps]], {job.steps[-1].name!r}" if job.steps else "a step"
        yield f"select.step: found {job.select.step!r}, expected {last}, because it selects among the answers of earlier steps"
    elif (n := job.of_step(job.steps[-1]).params().get("n", 1)) != 1:
        yield f"steps.{job.select.step}.sampling.n: is {n}; a step that picks an answer needs n = 1"


def _misfits_of_each_step(job: JobConfig) -> Iterator[str]:
    """Yield a message for each key of a step (or of a job without steps) that does not fit its engine or other keys."""
    for place, each in job.of_each_step():
        engine, prompt, params = each.engine, each.prompt, each.sampling.params()
        for kind in ("videos", "audios"):
            if engine.kind == "transformers" and getattr(prompt, kind):
                yield f'{place}prompt.{kind}: engine.kind "transformers" does not support {kind}; use "vllm"'
        if reason := why_not_forced(prompt.tool_choice, engine.kind, engine.tool_call_parser):
            yield f"{place}prompt.tool_choice: {reason}"
        for fault in faults_in(params.get("structured_outputs")):
            yield f"{place}sampling.structured_outputs{fault}"
        if prompt.lora is not None and engine.kind == "transformers":
            yield f'{place}prompt.lora: engine.kind "transformers" supports one adapter; set engine.lora, or use "vllm"'
        elif prompt.lora is not None and engine.kind == "vllm" and not engine.loras:
            example = 'legal = "adapters/legal"'
            yield f"{place}prompt.lora: there are no named adapters; add [engine.loras], for example {example}"
        yield from names_of_other_tools({"sampling": params}, place)


def _misfits_of_scoring(job: JobConfig) -> Iterator[str]:
    """Yield a message for each scoring table that has the scorer ``choice`` without choices."""
    of_steps = {f"steps.{step.name}": step.scoring for step in job.steps}
    for place, scoring in {"scoring": job.scoring, **of_steps}.items():
        tables = [table for table in scoring.tables if "choice" in table.scorers]
        if tables and not any(table.choices for table in tables):
            yield f'{place}: the scorer "choice" needs {place}.choices, the list of possible answers'


def _misfits_of_retry(job: JobConfig) -> Iterator[str]:
    jobs = [each for _, each in job.of_each_step()]
    extracts = {table.extractor for each in jobs for table in each.scoring.tables}
    parses = any(each.output.parse is not None for each in jobs)
    if job.retry.reask and extracts <= {"text"} and not parses:
        keys = "extract or parse of a step" if job.steps else "scoring.extract or output.parse"
        yield f"retry.reask: has no effect, because all answers are accepted; set {keys}"


def _misfits_of_engines(job: JobConfig) -> Iterator[str]:
    used = {step.engine for step in job.steps if step.prompt.lora is not None}
    used |= {""} if job.prompt.lora is not None else set()
    for name in ("", *job.engines):
        place, engine = f"engines.{name}" if name else "engine", job.with_engine(name).engine
        if job.budget.price_per_gpu_hour is not None and engine.base_url is not None:
            yield f"budget.price_per_gpu_hour: does not apply to the server of {place}; set budget.price_per_million_tokens"
        # A line of a batch file may name an adapter as its model.
        may_be_named = not name and job.may_have_lines
        for option in engine.options if engine.kind == "vllm" else ():
            here = called_here(option, "engine.options")
            if here is not None and not here.startswith("engine."):
                yield f"{place}.options.{option}: vLLM has no such option; did you mean {here!r}?"
        if engine.loras and name not in used and not may_be_named:
            yield f'{place}.loras: no row uses them; set prompt.lora, for example to "{{{{ column }}}}"'


def names_of_other_tools(tables: Any, place: str = "") -> Iterator[str]:
    """Yield a message for each key in ``sampling`` that is another tool's name for a setting, for example
    ``max_new_tokens``."""
    sampling = tables.get("sampling") if isinstance(tables, Mapping) else None
    for name in sampling if isinstance(sampling, Mapping) else ():
        if name in ("name", "task"):
            yield f"{place}sampling.{name}: belongs {AT_THE_TOP}"
        elif (here := called_here(name, "sampling")) is not None:
            yield f"{place}sampling.{name}: no such parameter; did you mean {here!r}?"
