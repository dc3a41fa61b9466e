"""What a run and its engine's process send each other arrives as it was, or is refused."""

from __future__ import annotations

import datetime
import resource
import socket
import string
import struct
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from batchkit import errors, types
from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.faults import Fault
from batchkit.engines.process.channel import Channel, Unsendable
from batchkit.engines.process.messages import (
    Close,
    Died,
    Done,
    NotStarted,
    OfEngine,
    OfRun,
    Open,
    Ready,
    Refused,
    Submit,
    Turn,
)
from batchkit.errors import PromptTooLongError, RowError
from batchkit.types import Choice, Completion, Cut, Pooled, Request, Row, Usage
from tests.support.engine_requests import Locked

TEXT = st.text(max_size=20)
COUNTS = st.integers(0, 2**63)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)
TABLES = st.dictionaries(TEXT, JSON, max_size=3)
TOOL_CALLS = st.none() | st.lists(TABLES, max_size=2)
ROW_ERRORS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RowError)
]
# Each that holds its pixels alone: Pillow packs and unpacks them without a loss.
GRAY = ["1", "L", "LA", "La", "I", "F", "I;16", "I;16B", "I;16L"]
MODES = [*GRAY, "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"]


@st.composite
def images(draw: st.DrawFn) -> Image.Image:
    size = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    blank = Image.new(draw(st.sampled_from(MODES)), size)
    n_bytes = len(blank.tobytes())
    return Image.frombytes(blank.mode, size, draw(st.binary(min_size=n_bytes, max_size=n_bytes)))


PARTS = st.builds(lambda text: {"type": "text", "text": text}, TEXT) | st.builds(
    lambda image: {"type": "image_pil", "image_pil": image}, images()
)
CONTENTS = TEXT | st.lists(PARTS, max_size=3)
MESSAGES = st.fixed_dictionaries(
    {"role": TEXT, "content": st.none() | CONTENTS},
    optional={"name": JSON, "tool_calls": TOOL_CALLS},
)
REQUESTS = st.builds(
    Request,
    row=st.builds(Row, COUNTS, TEXT, TABLES),
    messages=st.none() | st.lists(MESSAGES, max_size=2),
    prompt=st.none() | TEXT,
    sampling=TABLES,
    input_hash=TEXT,
    attempt=COUNTS,
    media_bytes=COUNTS,
    cut=st.none() | st.builds(Cut, COUNTS, COUNTS, COUNTS, COUNTS),
    note=TEXT,
    tools=TOOL_CALLS,
    tool_choice=JSON,
    parallel_tool_calls=st.none() | st.booleans(),
    chat_template_kwargs=TABLES,
    pair=st.none() | st.builds(types.Pair, CONTENTS, st.lists(CONTENTS, max_size=2), st.booleans()),
)
FAULTS = st.builds(
    Fault, st.sampled_from(["oom", "engine_crash", "stall", "timeout"]), TEXT, TEXT, st.booleans()
)
LOADS = st.builds(
    EngineLoad,
    *(COUNTS, COUNTS, st.floats(0, 1), COUNTS, COUNTS),
    events=st.lists(TEXT, max_size=2),
    served=TABLES,
    unfinished_tokens=COUNTS,
)
FLOATS = st.none() | st.lists(st.floats(allow_nan=False), max_size=3)
DONE = st.builds(
    Done,
    COUNTS,
    st.lists(
        st.builds(Choice, TEXT, st.none() | TEXT, JSON, st.none() | TEXT, TOOL_CALLS), max_size=3
    ),
    st.none() | st.builds(Usage, COUNTS, COUNTS, st.none() | COUNTS),
    st.floats(0, 1e9),
    st.none(),
    st.none() | TEXT,
    st.none() | st.builds(Pooled, st.none() | st.binary(), FLOATS, st.none() | TEXT, FLOATS),
)
ANSWERS = (
    st.builds(Ready, TABLES, st.dictionaries(TEXT, TEXT, max_size=2), LOADS)
    | st.builds(Refused, TEXT)
    | st.builds(NotStarted, TEXT, FAULTS, TABLES)
    | st.builds(Turn, st.lists(DONE, max_size=3), LOADS)
    | st.builds(Died, FAULTS, st.none() | COUNTS)
)


class Pair:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.run, self.engine = Channel(ours, OfEngine), Channel(theirs, OfRun)

    def close(self) -> None:
        self.run.close()
        self.engine.close()

    def request(self, request: Request) -> Request:
        """As the engine gets it."""
        self.run.send(Submit.of(7, request))
        message = self.engine.recv()
        assert message.number == 7
        received: Request = message.request
        return received

    def content(self, content: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        got = self.request(Request(Row(0, "", {}), messages, None, {}, ""))
        assert got.messages is not None
        return got.messages[0]["content"]

    def error(self, error: RowError) -> RowError:
        """As the run gets it."""
        completion = Completion(Request(Row(0, "", {}), None, "", {}, ""), error=error)
        self.engine.send(Turn([Done.of(7, completion)], EngineLoad(0, 0, 0, 0)))
        (done,) = self.run.recv().done
        received: RowError = done.error
        return received


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with closing(Pair()) as opened:
        yield opened


def seen(value: Any) -> Any:
    """``value``, with each image as what is to be seen of it."""
    if isinstance(value, Image.Image):
        return value.mode, value.size, value.tobytes()
    if isinstance(value, dict):
        return {key: seen(part) for key, part in value.items()}
    return [seen(part) for part in value] if isinstance(value, list | tuple) else value


@given(sent=REQUESTS)
def test_an_engine_gets_of_a_request_what_engines_read(pair: Pair, sent: Request) -> None:
    got = pair.request(sent)
    assert got.row.index == sent.row.index
    assert seen(got.messages) == seen(sent.messages)
    for name in ("prompt", "sampling", "attempt", "media_bytes", "cut", "tools", "tool_choice"):
        assert getattr(got, name) == getattr(sent, name), name
    assert got.chat_template_kwargs == sent.chat_template_kwargs
    assert seen(got.pair) == seen(sent.pair)


@given(sent=ANSWERS)
def test_what_an_engine_sends_arrives_as_it_was(pair: Pair, sent: Any) -> None:
    pair.engine.send(sent)
    got = pair.run.recv()
    assert got == sent
    assert type(got) is type(sent)


@pytest.mark.parametrize("kind", ROW_ERRORS)
def test_the_error_of_a_row_keeps_its_class(pair: Pair, kind: type[RowError]) -> None:
    got = pair.error(kind("planted"))
    assert type(got) is kind
    assert str(got) == "planted"
    assert got.kind == kind.kind


def test_the_error_of_a_row_keeps_what_was_set_on_it(pair: Pair) -> None:
    error = PromptTooLongError("planted")
    error.prompt_tokens, error.max_model_len = 900, 512
    error.add_note("found while it was tokenised")
    got = pair.error(error)
    assert isinstance(got, PromptTooLongError)
    assert (got.prompt_tokens, got.max_model_len) == (900, 512)
    assert got.__notes__ == ["found while it was tokenised"]


def test_an_error_of_a_class_of_its_own_becomes_the_one_that_it_is_a_kind_of(pair: Pair) -> None:
    class OwnError(PromptTooLongError):
        pass

    assert type(pair.error(OwnError("planted"))) is PromptTooLongError


def test_the_job_arrives_with_values_that_json_lacks(pair: Pair) -> None:
    job = JobConfig(
        engine={"kind": "dry-run", "options": {"sizes": (1, 2)}},
        prompt={"chat_template_kwargs": {"today": datetime.date(2026, 11, 22)}},
    )
    pair.run.send(Open.of(job))
    got = pair.engine.recv().job
    assert got == job
    assert got.prompt.chat_template_kwargs["today"] == datetime.date(2026, 11, 22)
    pair.run.send(Close())
    assert pair.engine.recv() == Close()


@pytest.mark.parametrize("mode", MODES)
def test_an_image_is_equal_to_the_pixel(pair: Pair, mode: str) -> None:
    size = (131, 67)
    blank = Image.new(mode, size)
    image = Image.frombytes(mode, size, np.random.default_rng(1).bytes(len(blank.tobytes())))
    (got,) = pair.content([image])
    assert (got.mode, got.size, got.tobytes()) == (mode, size, image.tobytes())


def test_an_image_that_a_request_has_twice_is_sent_once(pair: Pair) -> None:
    one, other = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
    first, second, third = pair.content([one, other, one])
    assert first is third
    assert seen([first, second]) == seen([one, other])


def test_an_image_is_held_by_its_request_alone(pair: Pair) -> None:
    held = weakref.ref(pair.content([Image.new("RGB", (8, 8))])[0])
    assert held() is None


def test_a_message_larger_than_the_socket_arrives_whole(pair: Pair) -> None:
    image = Image.new("RGB", (64, 64), "red")
    text = string.ascii_letters * 100_000
    messages = [{"role": "user", "content": [image, text]}]
    with ThreadPoolExecutor(1) as thread:
        request = Request(Row(0, "", {}), messages, None, {}, "")
        sending = thread.submit(pair.run.send, Submit.of(7, request))
        got = pair.engine.recv().request
        sending.result()
    assert seen(got.messages) == seen(messages)


def test_values_of_other_classes_arrive_as_plain_ones(pair: Pair) -> None:
    class Text(str):
        pass

    sent = [Text("tea"), np.float64(0.5), MappingProxyType({"a": 1}), (1, 2)]
    assert pair.content(sent) == ["tea", 0.5, {"a": 1}, [1, 2]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "type object"),
        (np.int64(3), "type int64"),
        (2**64, "serialize ints"),
        ("a\udcffb", "surrogates not allowed"),
        (Locked(), "it holds a lock"),
        (Image.new("P", (2, 2)), "palette: 2×2, mode P"),
        (Image.new("RGB", (0, 2)), "without pixels.*: 0×2"),
    ],
    ids=["object", "NumPy", "2**64", "surrogate", "locked", "palette", "empty"],
)
def test_what_can_not_be_sent_is_refused_and_the_next_message_arrives(
    pair: Pair, value: Any, words: str
) -> None:
    with pytest.raises(Unsendable, match=words):
        pair.content([Image.new("RGB", (8, 8)), value])
    assert pair.content(["tea"]) == ["tea"]


def test_pixels_for_which_there_is_no_room_are_refused(pair: Pair) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = open_files()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # holds for memfds, too
        with pytest.raises(Unsendable, match="File too large"):
            pair.content([Image.new("RGB", (8, 8))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_files() == before
    assert pair.content(["tea"]) == ["tea"]


def open_files() -> set[Path]:
    return {*Path("/proc/self/fd").iterdir()}


def test_a_thousand_images_leave_no_descriptor_open(pair: Pair) -> None:
    before = open_files()
    image = Image.new("RGB", (8, 8), "red")
    kept = []
    for n in range(1000):
        kept += pair.content([image])
        if n % 10 == 0:
            with pytest.raises(Unsendable):
                pair.content([image, object()])
    assert open_files() == before
    assert len(kept) == 1000


def test_few_descriptors_wait_in_the_socket_when_the_other_end_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 100_000))
    image = Submit.of(0, Request(Row(0, "", {}), [{"": Image.new("L", (1, 1))}], None, {}, ""))
    sent = 0
    with theirs, closing(Channel(ours, OfEngine)) as channel, suppress(BlockingIOError):
        while sent < 2000:
            channel.send(image)
            sent += 1
    assert 0 < sent < 300


@pytest.mark.parametrize(
    "sent", [Died(Fault("oom", "x", "y"), None), Close()], ids=["of the engine", "of the run"]
)
def test_only_messages_of_the_other_end_are_read(pair: Pair, sent: Any) -> None:
    sender, reader = (pair.run, pair.engine) if isinstance(sent, Died) else (pair.engine, pair.run)
    sender.send(sent)
    with pytest.raises(msgspec.ValidationError, match="Invalid value"):
        reader.recv()


@pytest.mark.parametrize(
    "sent",
    [
        Refused(7),  # type: ignore[arg-type]
        Died(Fault("odd", "x", "y"), None),  # type: ignore[arg-type]
        Turn([], EngineLoad("1", 0, 0.0, 0)),  # type: ignore[arg-type]
    ],
    ids=["number for text", "unknown kind", "text for a number"],
)
def test_a_value_of_another_type_is_not_read(pair: Pair, sent: Any) -> None:
    pair.engine.send(sent)
    with pytest.raises(msgspec.ValidationError):
        pair.run.recv()


@pytest.mark.parametrize("part", [b"", b"\0", struct.pack("=Q", 100) + b"cut off"])
def test_a_closed_end_is_the_end_also_in_the_middle_of_a_message(part: bytes) -> None:
    ours, theirs = socket.socketpair()
    with closing(Channel(ours, OfEngine)) as channel:
        assert not channel.poll(0)
        theirs.sendall(part)
        theirs.close()
        assert channel.poll(0)
        with pytest.raises(EOFError):
            channel.recv()
        with pytest.raises(OSError, match="Broken pipe"):
            channel.send(Close())
