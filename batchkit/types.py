"""The types that pass through batchkit: Row → Request → Completion → Record.

A later step never changes what an earlier one made, so all are frozen but media, which nobody modifies, and records,
which are filled in. (msgspec's structs are made in a tenth of the time of frozen dataclasses.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict, cast

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from batchkit.errors import RowError

if TYPE_CHECKING:
    from numpy import float32, uint8
    from numpy.typing import NDArray
    from PIL.Image import Image

ERROR_KINDS = (
    "template",
    "media",
    "prompt_too_long",
    "invalid_request",
    "timeout",
    "oom",
    "engine_crash",
    "server",
    "empty",
    "invalid_output",
    "rollout",
)

COUNT_LIMIT = 2**32
"""The number of row indexes: the sum over all rows of a run is still a number that JSON can hold."""
Count = Annotated[int, Meta(ge=0, lt=COUNT_LIMIT)]


class Row(Struct, frozen=True):
    """One row of the input.

    ``index`` is its position in the unfiltered input, over all files in order, and the key of the
    ledger. ``id`` is for people. ``error`` is set if the row could be counted but not read
    (a broken line); such a row becomes a failed record and is never rendered. Its ``fields`` are
    then what is known without reading it.
    """

    index: int
    id: str
    fields: Mapping[str, Any]
    error: RowError | None = None


class Task(NamedTuple):
    """A row to answer, and the number of the attempt, from 1.

    ``group`` is the same for rows that follow each other and begin alike; 0 if that is unknown.
    ``known``: what the ledger has of the row's generations, in its order (``storage/steps.py``).
    """

    row: Row
    attempt: int
    group: int = 0
    known: Sequence[Mapping[str, Any]] = ()


class Call(NamedTuple):
    """Which of its row's generations a request is, in a job with several per row.

    ``number`` counts the calls of a ``step`` from 0; a rollout's step is "" unless it names one.
    ``request_hash`` is the same for requests that ask the same, unless their row asks so again
    (``execution/rollouts/open_row.py``).
    ``engine``: the name of one of ``[engines]``, "" for ``[engine]``.
    """

    step: str
    number: int
    request_hash: str
    engine: str = ""

    @property
    def in_words(self) -> str:
        """As a message names it."""
        if not self.step:
            return f"call {self.number}"
        return f"step {self.step}" + f", call {self.number}" * (self.number > 0)


class Cut(Struct, frozen=True):
    """How a row's longest text was cut in the middle to make its prompt fit.

    ``kept``: characters of that text. ``prompt_tokens``: of the whole prompt before any cut.
    ``answer_tokens``: the room that the cut has to leave. ``times``: cuts tried, this one included.
    """

    kept: int
    prompt_tokens: int
    answer_tokens: int
    times: int = 1


Content = str | Sequence[Mapping[str, Any]]
"""A message's content: text, or parts in OpenAI's shape, in which an image part is
``{"type": "image_pil", "image_pil": PIL.Image}``, and one of a clip
``{"type": "audio", "audio": Audio}`` or ``{"type": "video", "video": Video}`` (``VideoFile`` for servers)."""


class Audio:
    """Mono sound: float32 ``samples``, from -1 to 1, so many a second. Not modified."""

    def __init__(self, samples: NDArray[float32], sample_rate: int) -> None:
        self.samples, self.sample_rate = samples, sample_rate

    @property
    def n_bytes(self) -> int:
        return self.samples.nbytes

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate

    @property
    def in_words(self) -> str:
        return f"sound of {self.seconds:.1f} s"


class Video:
    """Some of a clip's frames: RGB, uint8 of [n, height, width, 3], with their ``times_s`` from its start. Not modified.

    ``indexes``: their numbers among all ``total_frames`` of the clip, which shows ``fps`` of them a second and takes
    ``duration_s``.
    """

    def __init__(
        self,
        frames: NDArray[uint8],
        fps: float,
        duration_s: float,
        total_frames: int,
        indexes: Sequence[int],
        times_s: Sequence[float],
    ) -> None:
        self.frames, self.fps, self.duration_s = frames, fps, duration_s
        self.total_frames, self.indexes, self.times_s = total_frames, indexes, times_s

    @property
    def n_bytes(self) -> int:
        return self.frames.nbytes

    @property
    def in_words(self) -> str:
        n_frames, high, wide, _ = self.frames.shape
        return f"video of {self.duration_s:.1f} s, {n_frames} frames of {wide}x{high}"

    def halved(self) -> Video:
        """With every other of these frames."""
        indexes, times_s = self.indexes[::2], self.times_s[::2]
        length = self.fps, self.duration_s, self.total_frames
        return Video(self.frames[::2], *length, indexes, times_s)


class VideoFile:
    """A video as it was found, for a server that decodes it itself. ``type``: as in HTTP's headers."""

    def __init__(self, data: bytes, type: str) -> None:
        self.data, self.type = data, type

    @property
    def n_bytes(self) -> int:
        return len(self.data)

    @property
    def in_words(self) -> str:
        return f"video of {self.n_bytes:,} bytes"


Clip = Audio | Video | VideoFile
CLIPS = ("audio", "video")
"""Both a kind of media and the type of its parts."""


class Pair(NamedTuple):
    """What ``task = "score"`` compares: the query with each of the documents.

    ``is_list``: the row gives a list of documents, so its score is a list, too.
    """

    query: Content
    documents: Sequence[Content]
    is_list: bool


class Speech(NamedTuple):
    """How the sound of a request of ``task = "transcribe"`` is written down. ``prompt``: what was said before.
    ``timestamps``: the answer says when each sentence begins and ends, as Whisper does: ``<|0.00|> Hello.<|1.20|>``.
    ``asks_language``: the answer is the language, as ``<|en|>``, if the model has to be told it. ``seconds``: of the
    whole recording, if it is known."""

    language: str | None = None
    prompt: str = ""
    timestamps: bool = True
    asks_language: bool = False
    seconds: float = 0.0


class Segment(TypedDict):
    """A sentence or so of a recording, in seconds from its start."""

    start: float
    end: float
    text: str


class Coverage(TypedDict):
    """Where a recording has sound, and its transcript nothing: from when to when, and how many seconds in all."""

    missing_s: float
    gaps: list[list[float]]


class Transcript(Struct, frozen=True):
    """What is said in a recording of so many ``seconds``. ``coverage``: what may be missing; None if nothing is.
    ``language``: None if only the model knows it."""

    seconds: float
    segments: Sequence[Segment]
    coverage: Coverage | None = None
    language: str | None = None


Key = int | tuple[int, str, int]


class Request(Struct, frozen=True):
    """One row, or one generation of a row that has several, ready for an engine.

    One of ``messages`` (chat, OpenAI's shape, with images as in ``Content``), ``prompt`` (the text as
    it is) and ``pair`` is set. A request whose row could not be rendered has none, and is only used
    inside a failed Completion. ``sampling`` holds the names of ``vllm.SamplingParams``, or of
    ``vllm.PoolingParams`` if the job's task is not ``generate``. ``input_hash`` is the same
    for equal fields. ``media_bytes`` counts the decoded pixels that the request keeps in memory.
    ``cut`` is set if the row's text was too long and was shortened. ``note``: what is added to the
    prompt if the row is asked again; empty if nothing is. ``tools``: OpenAI's definitions of the
    functions that the model may call, and ``tool_choice``: "auto", "none", "required" or OpenAI's
    object that names one; ``parallel_tool_calls`` is False if it may call only one at a time.
    ``chat_template_kwargs``: the row's own, which override the job's; ``reasoning_effort`` among them
    is the parameter of OpenAI's API. ``lora``: the name of its adapter, "" for the model alone; None if the
    job has no ``prompt.lora``. ``endpoint``: the one of OpenAI's API that the row's batch line is for, as
    "responses" or "chat/completions"; None if the row is no such line. ``call`` is None if the row has only this one generation.
    ``clips``: the sound and video of a plain prompt, whose text says where they are in the model's own way. ``speech``:
    set if their sound is transcribed.
    """

    row: Row
    messages: Sequence[Mapping[str, Any]] | None
    prompt: str | None
    sampling: Mapping[str, Any]
    input_hash: str
    attempt: int = 1
    media_bytes: int = 0
    cut: Cut | None = None
    note: str = ""
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pair: Pair | None = None
    lora: str | None = None
    endpoint: str | None = None
    call: Call | None = None
    clips: Sequence[Any] = []  # Clip, but msgspec takes no union of two such types
    speech: Speech | None = None

    @property
    def key(self) -> Key:
        """What no other request in flight has."""
        if self.call is None:
            return self.row.index
        return self.row.index, self.call.step, self.call.number

    @property
    def step(self) -> str:
        """The name of the step that it is of; "" for a row with one generation."""
        return "" if self.call is None else self.call.step

    @property
    def images(self) -> list[Image]:
        """The request's images, in the order of the prompt."""
        return [part["image_pil"] for part in self._parts() if part["type"] == "image_pil"]

    @property
    def all_clips(self) -> list[Clip]:
        """Its sound and video, in the order of the prompt."""
        of_messages = [part[part["type"]] for part in self._parts() if part["type"] in CLIPS]
        return [*of_messages, *self.clips]

    def _parts(self) -> Iterator[Mapping[str, Any]]:
        contents = [message["content"] for message in self.messages or ()]
        if self.pair is not None:
            contents += [self.pair.query, *self.pair.documents]
        for content in contents:
            if content is not None and not isinstance(content, str):
                yield from content


class RowHint(NamedTuple):
    """What a row's request will be like, judged from its fields alone.

    ``beginning``: equal for requests that begin with the same images or the same text.
    ``max_tokens``: the longest answer that it may get, 0 if none is given. ``lora``: its adapter.
    """

    beginning: str
    max_tokens: int
    lora: str = ""


BROKEN_OFF = ("abort", "error", "insufficient_system_resource", "network_error")
"""Values of ``finish_reason`` that mean that the answer was cut off before its end: vLLM's, a
router's, DeepSeek's and Zhipu's."""


class Choice(Struct, frozen=True):
    """One of the ``n`` answers to a request. ``logprobs``: a list of tokens, or None.

    ``text`` is the answer alone, without its ``reasoning`` and its ``tool_calls`` (OpenAI's shape).
    """

    text: str
    finish_reason: str | None
    logprobs: Any = None
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] | None = None

    @property
    def is_answer(self) -> bool:
        return bool(self.text.strip() or self.tool_calls)


class Usage(Struct, frozen=True, omit_defaults=True):
    """Tokens; ``completion_tokens`` is summed over the choices, and so is the part of them that is
    reasoning, None if it is not known. ``cached_tokens``: those of the prompt that the engine had in its prefix cache,
    None if it is not known or there were none."""

    prompt_tokens: Count
    completion_tokens: Count
    reasoning_tokens: Count | None = None
    cached_tokens: Count | None = None


def sum_of(usages: Sequence[Usage]) -> Usage | None:
    """None if there are none."""
    if not usages:
        return None
    thought = [usage.reasoning_tokens for usage in usages if usage.reasoning_tokens is not None]
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(thought) if thought else None,
        sum(usage.cached_tokens or 0 for usage in usages) or None,
    )


class Entity(TypedDict):
    """A named entity: the characters from ``start`` to ``end`` of the prompt that the model saw."""

    label: str
    text: str
    start: int
    end: int
    score: float


class Pooled(Struct, frozen=True):
    """What a pooling model answers, depending on the job's task: ``vector`` (embed; float32, little
    endian), or one for each of the prompt's ``tokens`` in a row (token_embed; token_classify, with the ``entities``
    that these scores make, None if the tokens have no place in a text), ``probabilities`` of the model's classes in
    their order, with the ``label`` of the likeliest (classify), or ``scores``, one for each document of the request's
    pair (score)."""

    vector: bytes | None = None
    probabilities: Sequence[float] | None = None
    label: str | None = None
    scores: Sequence[float] | None = None
    tokens: int | None = None
    entities: Sequence[Entity] | None = None


class ErrorInfo(Struct, frozen=True):
    """Why a row failed, as its record shows it."""

    kind: str
    type: str
    message: str
    retryable: bool


class Completion(Struct, frozen=True):
    """An engine's reply to a request: ``choices`` or ``pooled``, and ``usage``; or ``error``.

    ``prompt`` is the text that the engine saw, including special tokens, if the engine knows it.
    ``parsed`` is the JSON value of the choice that counts, if ``output.parse`` asks for it.
    ``generations`` is set on the outcome of a whole row that had several: their number, and ``steps``,
    what each of ``[[steps]]`` answered, as the record has it. ``earlier_usage``: of other attempts in
    this start, which are paid for, too; None if there were none. ``selected``: the number of the choice
    that counts, if ``[select]`` picked one; ``votes``: how many choices have each prediction, if it
    counted them. ``transcript``: of a whole recording.
    """

    request: Request
    choices: Sequence[Choice] = ()
    usage: Usage | None = None
    latency_s: float = 0.0
    error: RowError | None = None
    prompt: str | None = None
    parsed: Any = None
    pooled: Pooled | None = None
    earlier_usage: Usage | None = None
    generations: int | None = None
    steps: Mapping[str, Any] | None = None
    selected: int | None = None
    votes: Mapping[str, int] | None = None
    transcript: Transcript | None = None

    @property
    def choice(self) -> Choice | None:
        """The one that counts: the first, unless another was selected; None if there is none."""
        return self.choices[self.selected or 0] if self.choices else None

    @property
    def text(self) -> str:
        """Without its reasoning and its tool calls; empty if there is none."""
        return "" if self.choice is None else self.choice.text

    @property
    def reasoning(self) -> str | None:
        return None if self.choice is None else self.choice.reasoning

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """In OpenAI's shape; empty if the model called no tool."""
        return (None if self.choice is None else self.choice.tool_calls) or ()

    @property
    def logprobs(self) -> Any:
        return None if self.choice is None else self.choice.logprobs

    @property
    def finish_reason(self) -> str | None:
        return None if self.choice is None else self.choice.finish_reason


class Function(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    """In OpenAI's shape."""

    id: NotRequired[str | None]
    type: NotRequired[str]
    function: Function


class ChoiceLine(TypedDict):
    """A choice as the logs have it."""

    text: NotRequired[str | None]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    finish_reason: NotRequired[str | None]
    logprobs: NotRequired[Any]


class VectorPlace(Struct, frozen=True, omit_defaults=True):
    """Where a vector is: the number of its segment, and of its row in there; as in its record. ``tokens``: a
    matrix begins there, with a vector for each so many tokens."""

    segment: Count
    row: Count
    dimensions: Annotated[int, Meta(ge=1, lt=COUNT_LIMIT)]
    tokens: Annotated[int, Meta(ge=1, lt=COUNT_LIMIT)] | None = None


class Counted(Struct, kw_only=True, omit_defaults=True):
    """The part of a record that a run counts."""

    index: Count
    id: str
    status: Literal["ok", "failed"]
    usage: Usage | None
    error: ErrorInfo | None
    earlier_usage: Usage | None = None
    generations: Count | None = None
    generations_lost: Count | None = None


class Record(Counted, kw_only=True, omit_defaults=True):
    """One line of ``results.jsonl``: the outcome of one row, in the documented format. A line is a record if
    msgspec can decode it as one.

    A failed record has ``text`` None and ``error`` set; an ok record the opposite. ``reasoning`` and
    ``tool_calls`` as in ``Choice``; a failed record, too, has the reasoning. ``parsed`` is the
    JSON value of the text, if ``output.parse`` asks for it.
    ``input_hash`` shows whether a later input holds the same row. ``truncated_tokens``: by how many
    tokens the prompt was cut to fit. ``scores`` is None if the job scores nothing, and ``prediction`` is there if
    not; ``unscored`` says why some of them could not be computed. ``earlier_usage`` as in ``Completion``. Of a pooling
    task, ``text`` is None, and set are ``label`` and ``probabilities`` (classify); ``score``, a list
    if the row gives a list of documents, with ``order``, their numbers, best first (score); or
    ``embedding`` (embed, token_embed, token_classify), with ``entities`` as in ``Pooled``. Of a row with several
    ``generations``, these are their number and ``steps``, by name, what each of ``[[steps]]``
    answered; ``usage`` and ``latency_s`` are sums. ``generations_lost``: how many of them ``steps.jsonl`` lost
    in a crash.
    ``selected`` and ``votes`` as in ``Completion``. ``lora`` and ``endpoint`` as in ``Request``. ``dry_run``: an engine that has no model answered.
    ``seconds``, ``segments``, ``coverage`` and ``language`` as in ``Transcript``.
    """

    attempt: Annotated[int, Meta(ge=0, lt=2**31)]
    text: str | None
    finish_reason: str | None
    latency_s: float
    finished_at: str
    fields: dict[str, Any] | Raw
    input_hash: str
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] | None = None
    parsed: Any = None
    prediction: str | UnsetType | None = UNSET
    scores: Mapping[str, float | None] | None = None
    unscored: str | None = None
    choices: Sequence[ChoiceLine] | None = None
    selected: Count | None = None
    votes: Mapping[str, Count] | None = None
    label: str | None = None
    probabilities: Sequence[float] | None = None
    score: float | Sequence[float] | None = None
    order: Sequence[Count] | None = None
    embedding: VectorPlace | None = None
    entities: Sequence[Entity] | None = None
    steps: dict[str, dict[str, Any]] | Raw | None = None
    prompt: str | None = None
    truncated_tokens: int | None = None
    lora: str | None = None
    endpoint: str | None = None
    dry_run: bool = False
    seconds: float | None = None
    segments: Sequence[Segment] | None = None
    coverage: Coverage | None = None
    language: str | None = None


def line_of_choice(choice: Choice) -> ChoiceLine:
    line = {
        "text": choice.text,
        "reasoning": choice.reasoning,
        "tool_calls": choice.tool_calls,
        "finish_reason": choice.finish_reason,
        "logprobs": choice.logprobs,
    }
    for name in ("reasoning", "tool_calls"):
        if line[name] is None:
            del line[name]
    return cast(ChoiceLine, line)


def utc_now() -> str:
    """Now, in UTC, as ``2026-11-21T01:02:03.456Z``."""
    ms = time.time_ns() // 1_000_000
    return f"{_second(ms // 1000)}.{ms % 1000:03}Z"


@lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
