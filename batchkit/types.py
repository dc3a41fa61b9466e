"""The types that pass through batchkit: Row → Request → Completion → Record.

No step changes a value that an earlier step made. So most types are frozen. Media are not, but no code modifies them;
records are not, because their fields are set one after another. Most types are msgspec structs, because these are
created ten times as fast as frozen dataclasses.
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

GREEDY_BELOW = 1e-5
"""Temperatures below this limit mean greedy decoding, as in vLLM (``_SAMPLING_EPS`` in ``sampling_params.py``)."""
COUNT_LIMIT = 2**32
"""Row indexes and token counts are below this limit, so that a sum over all rows of a run fits into 64 bits."""
Count = Annotated[int, Meta(ge=0, lt=COUNT_LIMIT)]


class Row(Struct, frozen=True):
    """One row of the input."""

    index: int  # position in the unfiltered input, over all files in order; the key in the logs
    id: str  # for people; need not be unique
    fields: Mapping[str, Any]
    # Set if the row was counted but can't be read (a broken line). Such a row fails without being rendered;
    # ``fields`` then holds only values known without reading it.
    error: RowError | None = None


class Task(NamedTuple):
    """A row to answer, with the number of its attempt."""

    row: Row
    attempt: int  # number of the attempt, from 1
    group: int = 0  # equal for adjacent rows with the same prefix; 0 if unknown
    # The row's generations that are already logged, in the order of the log (``storage/steps.py``).
    known: Sequence[Mapping[str, Any]] = ()
    tokens: float = (
        1.0  # what the row is expected to cost, to compare rows: 1 + the length of its answer
    )


class Call(NamedTuple):
    """The name of one generation of a row with several generations: its step, and its number within the step."""

    step: str  # "" for a rollout that names none
    number: int  # counts the calls of a step, from 0
    engine: str = ""  # name in ``[engines]``, "" for ``[engine]``

    @property
    def in_words(self) -> str:
        """The call as words for a message, for example ``step draft, call 1``."""
        if not self.step:
            return f"call {self.number}"
        return f"step {self.step}" + f", call {self.number}" * (self.number > 0)


class Cut(Struct, frozen=True):
    """A cut in the middle of a row's longest text that shortens the prompt so that it fits into ``max_model_len``."""

    kept: int  # number of characters left of the text
    prompt_tokens: int  # tokens of the whole prompt, before any cut
    answer_tokens: int  # number of tokens to leave for the answer
    times: int = 1  # number of cuts tried, including this one


Content = str | Sequence[Mapping[str, Any]]
"""A message's content: text, or parts in OpenAI's shape. An image part is
``{"type": "image_pil", "image_pil": PIL.Image}``; a clip is ``{"type": "audio", "audio": Audio}`` or
``{"type": "video", "video": Video}`` (``VideoFile`` for servers).
"""


class Audio:
    """Mono sound: float32 ``samples`` from -1 to 1, ``sample_rate`` per second. Never modified."""

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
    """Sampled frames of a video: uint8 RGB of shape [n, height, width, 3]. Never modified.

    ``times_s``: seconds from the start, per frame. ``indexes``: the frames' numbers among all ``total_frames`` of
    the video, which has ``fps`` frames per second and lasts ``duration_s``.
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
        """Return the video with every second frame."""
        indexes, times_s = self.indexes[::2], self.times_s[::2]
        length = self.fps, self.duration_s, self.total_frames
        return Video(self.frames[::2], *length, indexes, times_s)


class VideoFile:
    """An encoded video for a server that decodes it itself. ``type``: its MIME type."""

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
"""Types of content parts that hold sound or video. The kinds of media have the same names."""


class Pair(NamedTuple):
    """The texts that ``task = "score"`` compares: a query with each document.

    ``is_list``: the row has a list of documents, so its score is a list, too.
    """

    query: Content
    documents: Sequence[Content]
    is_list: bool


class Speech(NamedTuple):
    """Settings for the transcription of a request's sound (``task = "transcribe"``)."""

    language: str | None = None
    prompt: str = ""  # the text said before this sound
    timestamps: bool = True  # the answer has Whisper's time stamps: ``<|0.00|> Hello.<|1.20|>``
    asks_language: bool = False  # the answer is only the language, for example ``<|en|>``
    seconds: float = 0.0  # length of the whole recording; 0 if unknown


class Segment(TypedDict):
    """A piece of a transcript, about one sentence. ``start`` and ``end``: seconds from the beginning of the
    recording."""

    start: float
    end: float
    text: str


class Coverage(TypedDict):
    """Parts of a recording that have sound but no text: their total ``missing_s``, and ``gaps`` as [start, end], in
    seconds."""

    missing_s: float
    gaps: list[list[float]]


class Transcript(Struct, frozen=True):
    """The transcript of a whole recording."""

    seconds: float  # length of the recording
    segments: Sequence[Segment]
    coverage: Coverage | None = None  # sound that may lack text; None if all is covered
    language: str | None = None  # None if a server detected it: servers do not report it


Key = int | tuple[int, str, int]


class Request(Struct, frozen=True):
    """One row, or one of a row's several generations, ready for an engine.

    Exactly one of ``messages``, ``prompt`` and ``pair`` is set. A request whose row could not be
    rendered has none of them, and occurs only inside a failed Completion.
    """

    row: Row
    messages: Sequence[Mapping[str, Any]] | None  # chat, in OpenAI's shape; see ``Content``
    prompt: str | None  # text sent without a chat template
    # By name, as in ``vllm.SamplingParams``; for pooling tasks as in ``vllm.PoolingParams``.
    sampling: Mapping[str, Any]
    input_hash: str  # equal for equal fields
    attempt: int = 1
    media_bytes: int = 0  # decoded media that the request keeps in memory
    cut: Cut | None = None  # set if the row's text was too long and was shortened
    note: str = ""  # added to the prompt when ``retry.reask`` asks again; otherwise ""
    tools: Sequence[Mapping[str, Any]] | None = None  # OpenAI's function definitions
    tool_choice: Any = None  # "auto", "none", "required" or OpenAI's object that names a function
    parallel_tool_calls: bool | None = None  # False allows only one tool call at a time
    # Variables for the chat template: the job's, overridden by the row's own. OpenAI's parameter
    # ``reasoning_effort`` is one of them.
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pair: Pair | None = None  # for ``task = "score"``
    # Adapter name; "" for the base model; None if the job has no ``prompt.lora``.
    lora: str | None = None
    # Endpoint in the row's OpenAI batch line, for example "chat/completions"; None for other rows.
    endpoint: str | None = None
    call: Call | None = None  # None if the row has a single generation
    # Sound and video of a plain prompt, whose text has the model's own placeholders. The type is Clip, but
    # msgspec does not support a union of two such types.
    clips: Sequence[Any] = []
    speech: Speech | None = None  # set if the sound is to be transcribed
    # No other request may be in the engine meanwhile (``execution/self_check.py``).
    alone: bool = False
    # An answer to score: the engine writes none, and ``choices[0].logprobs`` of its completion has the tokens of this text.
    # Only vLLM can do this.
    scored: str | None = None
    # Equal for equal requests to the same engine (``rendering/request_hash.py``), unless a row with several generations
    # repeats a request (``execution/rollouts/open_row.py``). "" if the row was not rendered.
    request_hash: str = ""

    @property
    def key(self) -> Key:
        """The key of this request, unique among requests in flight."""
        if self.call is None:
            return self.row.index
        return self.row.index, self.call.step, self.call.number

    @property
    def step(self) -> str:
        """The name of the request's step; "" for a row with one generation."""
        return "" if self.call is None else self.call.step

    @property
    def images(self) -> list[Image]:
        """The request's images, in the order of the prompt."""
        return [part["image_pil"] for part in self._parts() if part["type"] == "image_pil"]

    @property
    def all_clips(self) -> list[Clip]:
        """The request's sound and video, in the order of the prompt."""
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
    """A cheap estimate about a row's request, made from the row's fields without rendering it. It is used to order
    rows."""

    beginning: str  # equal for requests that begin with the same images or the same text
    max_tokens: int  # longest allowed answer; 0 if unlimited
    lora: str = ""  # adapter name


BROKEN_OFF = ("abort", "error", "insufficient_system_resource", "network_error")
"""Values of ``finish_reason`` for answers that broke off: vLLM's, a router's, DeepSeek's and Zhipu's."""


class Choice(Struct, frozen=True):
    """One of the ``n`` answers to a request.

    ``text`` excludes ``reasoning`` and ``tool_calls`` (OpenAI's shape). ``logprobs``: a list of tokens, or None.
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
    """Token counts of a request."""

    prompt_tokens: Count
    completion_tokens: Count  # summed over the choices
    reasoning_tokens: Count | None = None  # part of completion_tokens; None if unknown
    cached_tokens: Count | None = None  # prompt tokens from the prefix cache; None if unknown or 0


def sum_of(usages: Sequence[Usage]) -> Usage | None:
    """Return the sum of ``usages``, or None for an empty list."""
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
    """A named entity: characters ``start`` to ``end`` of the prompt that the model saw."""

    label: str
    text: str
    start: int
    end: int
    score: float


class Pooled(Struct, frozen=True):
    """The answer of a pooling model. The job's task decides which fields are set."""

    # Float32, little endian: one vector (embed), or the vectors of all tokens, one after another
    # (token_embed, token_classify).
    vector: bytes | None = None
    probabilities: Sequence[float] | None = None  # classify: one per class, in the model's order
    label: str | None = None  # classify: the class with the highest probability
    scores: Sequence[float] | None = None  # score: one per document of the request's pair
    tokens: int | None = None  # number of vectors in ``vector``; None for a single one
    # token_classify; None if the tokens have no positions in a text.
    entities: Sequence[Entity] | None = None


class ErrorInfo(Struct, frozen=True):
    """The error of a failed row, as its record stores it."""

    kind: str
    type: str
    message: str
    retryable: bool


class Completion(Struct, frozen=True):
    """An engine's reply to a request: either ``choices`` or ``pooled``, with ``usage``, or an ``error``."""

    request: Request
    choices: Sequence[Choice] = ()
    usage: Usage | None = None  # None if unknown
    latency_s: float = 0.0
    error: RowError | None = None
    prompt: str | None = None  # text that the engine saw, with special tokens; None if unknown
    parsed: Any = None  # JSON value of the selected choice, with ``output.parse``
    pooled: Pooled | None = None  # for pooling tasks
    earlier_usage: Usage | None = None  # usage of earlier attempts in this start, if any
    generations: int | None = None  # number of the row's generations, if it has several
    # Set with ``[[steps]]``: each step's answer, as in the record.
    steps: Mapping[str, Any] | None = None
    selected: int | None = None  # number, from 0, of the choice that ``[select]`` picked
    votes: Mapping[str, int] | None = None  # choices for each prediction, if ``[select]`` counted
    transcript: Transcript | None = None  # transcript of a whole recording
    # If the answer was copied from an equal request: the index of that row, or the folder of the other run. Its usage is 0,
    # and null in the record.
    duplicate_of: int | None = None
    reused_from: str | None = None

    @property
    def is_copy(self) -> bool:
        return self.duplicate_of is not None or self.reused_from is not None

    @property
    def choice(self) -> Choice | None:
        """The selected choice, by default the first; None without choices."""
        return self.choices[self.selected or 0] if self.choices else None

    @property
    def text(self) -> str:
        """The answer without its reasoning and its tool calls, or ""."""
        return "" if self.choice is None else self.choice.text

    @property
    def reasoning(self) -> str | None:
        return None if self.choice is None else self.choice.reasoning

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls, in OpenAI's shape; empty if the model called no tool."""
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
    """A tool call in OpenAI's shape."""

    id: NotRequired[str | None]
    type: NotRequired[str]
    function: Function


class ChoiceLine(TypedDict):
    """A choice as it is written in a line of the logs."""

    text: NotRequired[str | None]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    finish_reason: NotRequired[str | None]
    logprobs: NotRequired[Any]


class VectorPlace(Struct, frozen=True, omit_defaults=True):
    """The position of a record's vector in the run folder: the number of its segment file, and the row in that file. If
    there is one vector per token, ``row`` is the first of them, and ``tokens`` their number."""

    segment: Count
    row: Count
    dimensions: Annotated[int, Meta(ge=1, lt=COUNT_LIMIT)]
    tokens: Annotated[int, Meta(ge=1, lt=COUNT_LIMIT)] | None = None


class Counted(Struct, kw_only=True, omit_defaults=True):
    """The fields of a record that are read to count a run's rows and tokens."""

    index: Count
    id: str
    status: Literal["ok", "failed"]
    usage: Usage | None
    error: ErrorInfo | None  # set if failed
    earlier_usage: Usage | None = None  # usage of earlier attempts in the same start
    generations: Count | None = None  # number of the row's generations, if it has several
    generations_lost: Count | None = None  # generations that ``steps.jsonl`` lost in a crash
    duplicate_of: Count | None = None  # as in Completion
    reused_from: str | None = None  # as in Completion


class LoggedAnswer(Counted, kw_only=True, omit_defaults=True):
    """The fields that a record shares with a generation (``storage/lines.py``)."""

    attempt: Annotated[int, Meta(ge=0, lt=2**31)]  # number of the attempt, from 1
    text: str | None  # None for pooling tasks, and in the record of a failed row
    finish_reason: str | None
    latency_s: float
    finished_at: str  # UTC, see ``utc_now``
    reasoning: str | None = None  # may also be set if failed
    tool_calls: Sequence[ToolCall] | None = None
    choices: Sequence[ChoiceLine] | None = None  # set if there are several, or logprobs
    selected: Count | None = None  # as in Completion
    votes: Mapping[str, Count] | None = None  # as in Completion
    lora: str | None = None  # as in Request
    request_hash: str | None = None  # as in Request; None if there was no request


class Record(LoggedAnswer, kw_only=True, omit_defaults=True):
    """One line of ``results.jsonl``: the outcome of one row. A line is valid if msgspec decodes it as a Record.

    For rows with several generations, ``usage`` and ``latency_s`` are sums.
    """

    fields: dict[str, Any] | Raw  # the input columns in ``output.keep``
    input_hash: str  # shows whether a later input has the same row
    parsed: Any = None  # JSON value of the text, with ``output.parse``
    # Unset if the job scores nothing; None if the answer contains no prediction.
    prediction: str | UnsetType | None = UNSET
    scores: Mapping[str, float | None] | None = None  # None if the job scores nothing
    unscored: str | None = None  # why some scores could not be computed
    label: str | None = None  # classify
    probabilities: Sequence[float] | None = None  # classify
    score: float | Sequence[float] | None = None  # score; a list if the row has a list of documents
    order: Sequence[Count] | None = None  # score: numbers of the documents, best first
    embedding: VectorPlace | None = None  # embed, token_embed, token_classify
    entities: Sequence[Entity] | None = None  # token_classify, as in Pooled
    steps: dict[str, dict[str, Any]] | Raw | None = None  # answers of ``[[steps]]``, by step name
    prompt: str | None = None  # with ``output.prompt``
    truncated_tokens: int | None = None  # tokens cut from the prompt to make it fit
    endpoint: str | None = None  # as in Request
    dry_run: bool = False  # the answer is from an engine without a model
    seconds: float | None = None  # transcribe: this and the next three are as in Transcript
    segments: Sequence[Segment] | None = None
    coverage: Coverage | None = None
    language: str | None = None


def line_of_choice(choice: Choice) -> ChoiceLine:
    """Return ``choice`` as it is written to a log, without ``reasoning`` and ``tool_calls`` if they are None."""
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
    """Return the current time in UTC, for example ``2026-11-21T01:02:03.456Z``."""
    ms = time.time_ns() // 1_000_000
    return f"{_second(ms // 1000)}.{ms % 1000:03}Z"


@lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
