"""``[[steps]]``, ``[rollout]`` and ``[select]``: several generations for a row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from batchkit.config.seams import SCORERS, Extract, ScorerName
from batchkit.config.suggest import did_you_mean
from batchkit.config.tables.base import Free, Identity, Table
from batchkit.config.tables.engine import SamplingTable
from batchkit.config.tables.prompt import PromptTable
from batchkit.config.tables.scoring import ScoringTable

if TYPE_CHECKING:
    from batchkit.config.tables.job import JobConfig

_NAME_OF_ENGINE = re.compile(r"[A-Za-z0-9_-]+")
SCORING_OF_STEP = ("extract", "pattern", "key", "choices", "reference", "scorers", "tolerance")


class StepTable(Table):
    """One generation of a row, in the order of the file; the last one that runs gives the row's answer.

    Its templates see the row's fields, and what the steps before it answered: `steps.NAME.text`,
    `.reasoning`, `.tool_calls`, `.json` (the text's JSON value), `.prediction` and `.scores`, `.choices`
    (the texts of all `n`), `.selected` (with `[select]`: the number of the one that counts, from 0) and `.skipped`.
    """

    name: Identity[str] = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Its name in templates, in `steps.jsonl` and in tables.",
    )
    prompt: PromptTable = Field(PromptTable(), description="As `[prompt]`.")
    sampling: SamplingTable = Field(
        SamplingTable(), description="As `[sampling]`, which gives what is not set here."
    )
    engine: Identity[str] = Field(
        "", description="The name of one of `[engines]`; by default `[engine]`."
    )
    when: Identity[str | None] = Field(
        None,
        description="A template; the step is skipped if it gives nothing, `false`, `no`, `none` or `0`.",
    )
    answer: Identity[bool] = Field(
        True,
        description="`false` for a step that plans or judges: the row's answer is that of the last other step.",
    )
    parse: Identity[Literal["json"] | None] = Field(None, description="As `output.parse`.")
    extract: Identity[Extract | None] = Field(None, description="As `scoring.extract`.")
    pattern: Identity[str | None] = Field(None, description="As `scoring.pattern`.")
    key: Identity[str | None] = Field(None, description="As `scoring.key`.")
    choices: Identity[list[str] | None] = Field(None, description="As `scoring.choices`.")
    reference: Identity[str | None] = Field(None, description="As `scoring.reference`.")
    scorers: Identity[list[ScorerName] | None] = Field(None, description="As `scoring.scorers`.")
    tolerance: Identity[NonNegativeFloat | None] = Field(
        None, description="As `scoring.tolerance`."
    )

    @property
    def scoring(self) -> ScoringTable:
        """What is read from its answers."""
        given = {name: getattr(self, name) for name in SCORING_OF_STEP}
        return ScoringTable(**{name: value for name, value in given.items() if value is not None})

    @property
    def has_scoring(self) -> bool:
        """True if its answers are read in a way of their own."""
        return any(getattr(self, name) is not None for name in SCORING_OF_STEP)

    @model_validator(mode="after")
    def _coherent(self) -> StepTable:
        _ = self.scoring  # raises what does not fit
        return self

    @model_serializer(mode="wrap")
    def _without_sampling_of_job(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A default written down would replace what ``[sampling]`` says."""
        given = self.sampling.model_dump(exclude_unset=True)
        found = {name: value for name, value in dump(self).items() if name != "sampling"}
        return {**found, "sampling": given} if given else found


class RolloutTable(Table):
    """A function instead of `[prompt]` and `[[steps]]`: `async def solve(row, generate)`, which is
    called for each row and returns its answer, a text or a dict (docs/steps.md). Its code is trusted."""

    function: Identity[str] = Field(
        pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$",
        description="`module:name`, or `path/to/file.py:name`; a module is looked for beside the job file, too.",
    )
    concurrency: Free[PositiveInt] = Field(
        4096,
        description="Rows that are begun at a time, those that wait for something else included.",
    )


class SelectTable(Table):
    """Which of the `n` answers of `sampling.n` counts: of the row's, and of those of each step, which its own
    `extract` and `scorers` read if it has any, else those of `[scoring]`. Only whole answers are chosen."""

    by: Identity[Literal["majority", "scorer", "step"] | None] = Field(
        None,
        description="`majority`: the first of those whose prediction (`scoring.extract`) most of them have:"
        " the same one of `scoring.choices`, number or words; `scorer`: the first with the highest score;"
        " `step`: the one whose number, from 1, the step `select.step` answers; its templates see"
        " `candidates`, the texts, and its `extract` is `number` by default.",
    )
    scorer: Identity[ScorerName | None] = Field(
        None, description="For `scorer`: one of `scoring.scorers`; by default the only one."
    )
    step: Identity[str | None] = Field(None, description="For `step`: the last of `[[steps]]`.")


def misfits_of_steps(job: JobConfig) -> Iterator[str]:
    """A line for each key of ``job`` that does not fit its steps, rollout or selection."""
    names = [step.name for step in job.steps]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"steps: two are named {name!r}; give each a name of its own"
    several = "[[steps]]" if job.steps else "[rollout]" if job.rollout is not None else None
    if job.steps and job.rollout is not None:
        yield "[rollout]: its function asks for all of a row's generations, so leave [[steps]] out"
    if several is not None and job.task != "generate":
        yield f'{several}: is for task = "generate"; task is "{job.task}"'
    elif several is not None:
        for name, field in PromptTable.model_fields.items():
            if getattr(job.prompt, name) != field.default and name != "chat_template_kwargs":
                yield f"prompt.{name}: {several} has prompts of its own; leave it out here"
        if job.output.parse is not None:
            where = "a step, as its parse" if job.steps else "[[steps]]"
            yield f"output.parse: belongs to {where}; {several} is given"
    if job.rollout is not None:
        yield from _misfits_of_rollout(job)
    for place, step in enumerate(job.steps):
        yield from _misfits_of_step(job, step, is_first=place == 0)
    for name in job.engines:
        if not _NAME_OF_ENGINE.fullmatch(name):
            yield f"engines.{name!r}: name it with letters, digits, - and _"
    if job.steps and not any(step.answer for step in job.steps):
        yield "steps: all have answer = false, and one of them gives the row's answer"
    used = {step.engine for step in job.steps} - {""}
    if job.rollout is None and used <= job.engines.keys():  # a function names them as it runs
        for name in job.engines.keys() - used:
            yield f"engines.{name}: no step uses it; give one engine = {name!r}, or leave it out"
    if job.steps and "steps" in job.vars:
        yield "vars.steps: templates know the answers of [[steps]] by that name; choose another"
    yield from _misfits_of_select(job)
    if job.scoring.judge is not None and job.scoring.judge.step is not None:
        yield from _misfits_of_scoring_step(job, job.scoring.judge.step)


def _misfits_of_scoring_step(job: JobConfig, name: str) -> Iterator[str]:
    answers = {step.name: step.answer for step in job.steps}
    if name not in answers:
        known = ", ".join(answers) or "none is given"
        yield f"scoring.judge.step: found {name!r}, expected one of [[steps]]: {known}{did_you_mean(name, answers)}"
    elif answers[name]:
        yield f"steps.{name}: scores the answers (scoring.judge.step); give it answer = false, as it gives none"


def _misfits_of_rollout(job: JobConfig) -> Iterator[str]:
    """What a function does itself."""
    if job.retry.reask:
        yield "retry.reask: a function asks again itself; leave it out with [rollout]"
    if job.retry.on_too_long == "truncate-middle":
        yield "retry.on_too_long: a function shortens its prompts itself; leave it out with [rollout]"
    if job.sampling.sampling_column is not None:
        yield (
            "sampling.sampling_column: a function gives a row's parameters itself, as generate(…,"
            " temperature=row[…]); leave it out with [rollout]"
        )


def _misfits_of_step(job: JobConfig, step: StepTable, *, is_first: bool) -> Iterator[str]:
    key, prompt = f"steps.{step.name}", step.prompt
    if hasattr(dict, step.name):
        yield f"{key}: a template can't read steps.{step.name}, a method of Python's dict; name it otherwise"
    for name in {*SCORERS.also} & {*(step.scorers or ())}:
        yield (
            f"{key}.scorers: {name} is computed once the run has ended, and later steps could not see"
            " it; name it in scoring.scorers"
        )
    if step.engine and step.engine not in job.engines:
        known = ", ".join(job.engines) or "none is given"
        hint = did_you_mean(step.engine, job.engines)
        yield f"{key}.engine: found {step.engine!r}, expected one of [engines]: {known}{hint}"
    has_prompt = prompt.user is not None or prompt.user_file is not None or prompt.images
    if not is_first and not has_prompt:
        yield (
            f"{key}.prompt: has no user, user_file or images; only the first step can send a row's own"
            " prompt or messages"
        )


def _misfits_of_select(job: JobConfig) -> Iterator[str]:
    select = job.select
    if select.by is None:
        if select.scorer is not None or select.step is not None:
            yield 'select.by: is missing: "majority", "scorer" or "step"'
        return
    if job.task != "generate":
        yield f'[select]: is for task = "generate"; task is "{job.task}"'
    if job.rollout is not None:
        yield "[select]: a function chooses itself; leave it out with [rollout]"
    for name in ("scorer", "step"):
        if select.by != name and getattr(select, name) is not None:
            yield f'select.{name}: is for by = "{name}"; by is "{select.by}"'
    judged = [*map(job.of_step, job.steps[:-1] if select.by == "step" else job.steps)] or [job]
    if not any(map(_may_have_several, judged)):
        yield f"sampling.n: is 1{' in each step' * bool(job.steps)}; [select] chooses among several answers"
    if select.by == "step":
        yield from _misfits_of_judge(job)
        return
    for place, table in dict(_read_for_choice(job)).items():
        if select.by == "majority" and not {"extract", "choices"} & table.model_fields_set:
            yield (
                f'select.by: "majority" counts predictions; say what they are: {place}.extract ='
                f' "final-answer" or another, "text" for whole answers, or list them in {place}.choices'
            )
        if select.by == "scorer" and job.steps and table.reference == "steps":
            yield (
                f"{place}.reference: a choice knows the answers of [[steps]] by the name 'steps'; give"
                " that field of the rows another name"
            )
        if select.by == "scorer":
            yield from _misfits_of_scorer(select.scorer, table.scorers, f"{place}.scorers")


def _read_for_choice(job: JobConfig) -> Iterator[tuple[str, ScoringTable]]:
    """The scoring of each generation that may have several answers, and its place in the job file."""
    if not job.steps:
        yield "scoring", job.scoring
    for step in job.steps:
        if _may_have_several(job.of_step(step)):
            own = f"steps.{step.name}", step.scoring
            yield own if step.has_scoring else ("scoring", job.scoring)


def _may_have_several(job: JobConfig) -> bool:
    """A row's own parameters may have an ``n``, and so may the body of a request that is a row."""
    is_body = not (job.prompt.user or job.prompt.user_file)
    has_own = is_body or job.sampling.sampling_column is not None
    return has_own or job.params().get("n", 1) != 1


def _misfits_of_scorer(
    name: ScorerName | None, scorers: list[ScorerName], place: str
) -> Iterator[str]:
    if name is None and len(scorers) != 1:
        yield f"select.scorer: is missing; {place} has {len(scorers)}: name one of them"
    elif name is not None and name not in scorers:
        yield f"select.scorer: found {name!r}, expected one of {place}"
    elif (chosen := name or scorers[0]) in SCORERS.also:
        yield (
            f"select.scorer: {chosen} is computed when all rows are settled, so it can't choose; a step"
            ' can judge (by = "step")'
        )


def _misfits_of_judge(job: JobConfig) -> Iterator[str]:
    if len(job.steps) < 2 or job.select.step != job.steps[-1].name:
        yield (
            f"select.step: found {job.select.step!r}, expected the name of the last of [[steps]], behind"
            " the one whose answers it judges"
        )
    elif (n := job.of_step(job.steps[-1]).params().get("n", 1)) != 1:
        yield (
            f"steps.{job.select.step}.sampling.n: is {n}, and a step that picks an answer answers once; give"
            " it sampling = { n = 1 }"
        )
