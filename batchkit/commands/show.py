"""The ``show`` command: prints rows of a run with their prompts, images, answers and errors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.masking import masked_text
from batchkit.config.tables.input import variants
from batchkit.config.terminal import cut_in_the_middle
from batchkit.errors import JobError, MediaError
from batchkit.rendering.media.source import shown
from batchkit.rendering.messages import as_text
from batchkit.runs.inputs import InputRows, Prompt
from batchkit.runs.reach import Reach
from batchkit.sources import reader
from batchkit.storage.checkpoint import check_log
from batchkit.storage.lines import answers_in_words, call_in_words, choice_in_words, failure_kind
from batchkit.storage.newest_lines import Generations
from batchkit.storage.score_store import read_scored

_MOST_THOUGHT = 300  # characters of the reasoning
_MOST_SHOWN = 4_000  # characters of a prompt or an answer; --json prints all of it


class ShownRow(NamedTuple):
    """A row to print.

    - ``prompt``: None if the prompt can't be rendered again; the row's ``fields`` are printed instead.
    - ``images``: {name, width, height} as the model receives them, or {name, problem}.
    - ``steps``: the answer of each generation, if the row has several.
    - ``clips``: kind and name of each sound and video.
    """

    record: Mapping[str, Any]
    prompt: str | None
    images: Sequence[Mapping[str, Any]]
    fields: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]] = ()
    clips: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        found = {
            **self.record,
            "prompt": self.prompt,
            "images": self.images,
            **({"clips": self.clips} if self.clips else {}),
        }
        of_function = self.steps and "steps" not in self.record
        return found | {"calls": self.steps} if of_function else found

    def to_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        record = self.record
        yield f"--- row {record['index']} (id {record['id']}), {record['status']}"
        for image in self.images:
            size = "{name}, {width} × {height}" if "width" in image else "{problem}"
            yield f"image {size.format_map(image)}"
        yield from self.clips
        if self.prompt is not None:
            yield cut_in_the_middle(self.prompt, _MOST_SHOWN)
        else:
            yield from (
                f"{name} = {reader.shown(value, 80)}" for name, value in self.fields.items()
            )
        yield from self._step_lines()
        if error := record.get("error"):
            yield from _reasoning_line(record)
            yield f"error {error.get('kind')}: {error.get('message')}"
        else:
            choices = record.get("choices") or [record]
            for choice, answer in zip(choices, answers_in_words(record), strict=True):
                yield from _reasoning_line(choice)
                yield f"→ {cut_in_the_middle(answer, _MOST_SHOWN)}"
        yield f"({', '.join(self._facts())})"

    def _step_lines(self) -> Iterator[str]:
        """Yield a line for the answer or error of each generation, if the row has several."""
        for step in self.steps:
            name = call_in_words(step)
            if step.get("skipped"):
                yield f"{name}: skipped"
                continue
            yield from _reasoning_line(step)
            if error := step.get("error"):
                yield f"{name}: error {error.get('kind')}: {error.get('message')}"
            else:
                yield f"{name}: {cut_in_the_middle(choice_in_words(step), _MOST_SHOWN)}"

    def _facts(self) -> Iterator[str]:
        record = self.record
        for name, score in (record.get("scores") or {}).items():
            yield f"{name} {'unscored' if score is None else f'{score:.3g}'}"
        if usage := record.get("usage"):
            yield f"{usage['prompt_tokens']:,} prompt tokens"
            if usage["completion_tokens"]:
                yield f"{usage['completion_tokens']:,} completion tokens"
            if thought := usage.get("reasoning_tokens"):
                yield f"{thought:,} of them reasoning"
        if reason := record.get("finish_reason"):
            yield f"finish_reason {reason}"
        if (seconds := record.get("seconds")) is not None:
            yield f"{seconds:,.1f} s of sound"
        if coverage := record.get("coverage"):
            yield f"coverage: {coverage['missing_s']:g} s of sound without text"
        if record.get("generations") is not None:
            yield f"{record['generations']} generations"
        if (chosen := record.get("selected")) is not None:
            votes = (record.get("votes") or {}).values()
            agreed = f" by {max(votes)} of {sum(votes)} votes" if votes else ""
            yield f"answer {chosen + 1} was chosen{agreed}"
        yield f"attempt {record.get('attempt')}"


def _reasoning_line(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the beginning of an answer's reasoning, which may be far longer than the answer."""
    if thought := " ".join((answer.get("reasoning") or "").split()):
        more = "…" if len(thought) > _MOST_THOUGHT else ""
        yield f"(thought: {thought[:_MOST_THOUGHT]}{more})"


class ShownRows(NamedTuple):
    """The rows to print. ``problem``: why some prompts can't be rendered again; None if all could be."""

    rows: Sequence[ShownRow]
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        return {"rows": [row.to_json() for row in self.rows], "problem": self.problem}


def show_rows(
    folder: Path,
    *,
    failed: bool,
    ids: Collection[str],
    most: int | None,
    media: Sequence[Path] = (),
) -> ShownRows:
    """Return the first ``most`` rows of the run in input order. ``failed`` selects failed rows, ``ids`` selects rows by
    id.

    If ``most`` is None, it is five; if ``ids`` is given, it is unlimited. With ``input.cross``, the id of an input row selects all
    its combinations. Prompts are rendered again from the input, if ``Reach`` allows reading it.

    Raises:
        JobError: No record has one of the ids.
    """
    check_log(folder)
    reach = Reach.of(folder, media)
    cross = reach.job.input.cross
    labels = [f"/{variant.label}" * bool(cross) for variant in variants(cross)]

    def names_of(record: Mapping[str, Any]) -> set[str]:
        return {record["id"], record["id"].removesuffix(labels[record["index"] % len(labels)])}

    wanted = (
        record
        for record in read_scored(folder)
        if (not failed or failure_kind(record)) and (not ids or names_of(record) & {*ids})
    )
    records = list(islice(wanted, most or (None if ids else 5)))
    if missing := {*ids}.difference(*map(names_of, records)):
        which = "failed record" if failed else "record"
        raise JobError(f"{folder}: no {which} with the id {', '.join(sorted(missing))}")
    inputs = InputRows(reach.job, {record["index"] for record in records}, reach)
    with closing(Generations(folder)) as generations:
        rows = [
            _shown(record, inputs.prompt(record), reach, generations.of_record(record))
            for record in records
        ]
    return ShownRows(rows, inputs.problem and masked_text(inputs.problem))


def _shown(
    record: Mapping[str, Any],
    prompt: Prompt,
    reach: Reach,
    steps: Sequence[Mapping[str, Any]],
) -> ShownRow:
    text = record.get("prompt")
    if text is None and prompt.request is not None:
        text = as_text(prompt.request, "[image]")
    images = [_image(source, reach) for source in prompt.sources]
    clips = [f"{kind} {shown(source, kind)}" for kind, source in prompt.clips]
    fields = prompt.fields or record.get("fields") or {}
    return ShownRow(record, text, images, fields, steps, clips)


def _image(source: Any, reach: Reach) -> dict[str, Any]:
    try:
        width, height = reach.image(source).size
    except MediaError as error:
        return {"name": shown(source), "problem": masked_text(str(error))}
    return {"name": shown(source), "width": width, "height": height}
