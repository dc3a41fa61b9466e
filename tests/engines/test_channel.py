"""What a run and its engine's process send each other arrives as it was, or is refused."""

from __future__ import annotations

import datetime
import os
import string
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing import Pipe
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from batchkit import errors, types
from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.faults import Fault
from batchkit.engines.process.channel import (
    Channel,
    Close,
    Died,
    NotStarted,
    OfEngine,
    OfRun,
    Open,
    Ready,
    Refused,
    Submit,
    Turn,
    Unsendable,
)
from batchkit.errors import PromptTooLongError, RowError
from batchkit.types import Choice, Completion, Cut, Pooled, Request, Row, Usage
from tests.support.engine_requests import Locked

ROW_ERRORS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RowError)
]


class OwnError(PromptTooLongError):
    pass


IMAGE = Image.frombytes("RGB", (131, 67), np.random.default_rng(1).bytes(131 * 67 * 3))
PARTS = [{"type": "text", "text": "what?"}, {"type": "image_pil", "image_pil": IMAGE}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
TALK = [{"role": "user", "content": PARTS}, {"role": "assistant", "tool_calls": CALLS}]
WHOLE = Request(
    Row(2**31, "", {}),
    TALK,
    "tea ☕",
    {"temperature": 0.5, "stop": ["a"], "seed": 2**63, "extra_args": {"deep": [None, True]}},
    "0123456789abcdef",
    attempt=3,
    media_bytes=35_108,
    cut=Cut(10, 900, 20, 2),
    note="mind the form",
    tools=[{"type": "function", "function": {"name": "add"}}],
    tool_choice={"type": "function", "function": {"name": "add"}},
    parallel_tool_calls=False,
    chat_template_kwargs={"enable_thinking": False},
    pair=types.Pair(PARTS, ["one", PARTS], is_list=True),
    call=types.Call("draft", 2, "judge"),
)
NOBODY = Request(Row(0, "", {}), None, None, {}, "")
ANSWERED = Completion(
    NOBODY,
    [Choice("yes", "stop", [{"token": "yes"}], "since", CALLS), Choice("", None)],
    Usage(9, 4, 2),
    0.25,
    prompt="<user>tea",
)
POOLED = Completion(NOBODY, [], pooled=Pooled(b"\0\1", [0.5, 0.5], "tea", [0.25]))
SERVED = {"id": {"deep": 1}}
LOAD = EngineLoad(3, 2, 0.5, 1, 2**40, events=["a"], served=SERVED, unfinished_tokens=7)
FAULT = Fault("stall", "x", "y", is_unexplained_kill=True)


class Pair:
    def __init__(self) -> None:
        ours, theirs = Pipe()
        self.run, self.engine = Channel(ours, OfEngine), Channel(theirs, OfRun)

    def close(self) -> None:
        self.run.close()
        self.engine.close()

    def request(self, request: Request) -> Request:
        """As the engine gets it."""
        self.run.send(Submit(7, request))
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
        self.engine.send(Turn([(7, Completion(NOBODY, error=error))], EngineLoad(0, 0, 0.0, 0)))
        ((_, got),) = self.run.recv().done
        assert got.error is not None
        received: RowError = got.error
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


@pytest.mark.parametrize("sent", [WHOLE, NOBODY], ids=["with all", "with nothing"])
def test_an_engine_gets_a_request_as_it_was(pair: Pair, sent: Request) -> None:
    got = pair.request(sent)
    for name in Request.__struct_fields__:
        assert seen(getattr(got, name)) == seen(getattr(sent, name)), name


@pytest.mark.parametrize(
    "sent",
    [
        Ready({"max_num_seqs": 8}, {"vllm": "1"}, LOAD),
        Refused("no such model"),
        NotStarted("out of memory", FAULT, {"max_num_seqs": 8}),
        Turn([], LOAD),
        Turn([(2**40, ANSWERED), (7, POOLED)], LOAD),
        Died(FAULT, None),
        Died(FAULT, 7),
    ],
    ids=lambda sent: type(sent).__name__,
)
def test_what_an_engine_sends_arrives_as_it_was(pair: Pair, sent: Any) -> None:
    pair.engine.send(sent)
    got = pair.run.recv()
    assert got == sent
    assert type(got) is type(sent)


@pytest.mark.parametrize(
    ("kind", "arrives_as"),
    [*((kind, kind) for kind in ROW_ERRORS), (OwnError, PromptTooLongError)],
)
def test_the_error_of_a_row_keeps_its_class_and_what_was_set_on_it(
    pair: Pair, kind: type[RowError], arrives_as: type[RowError]
) -> None:
    """One of a class that is not batchkit's becomes the error that it is a kind of."""
    error = kind("planted")
    error.__dict__["prompt_tokens"] = 900
    got = pair.error(error)
    assert type(got) is arrives_as
    assert (str(got), got.kind, vars(got)) == ("planted", kind.kind, {"prompt_tokens": 900})


def test_the_job_arrives_with_values_that_json_lacks(pair: Pair) -> None:
    today = datetime.date(2026, 11, 22)
    engine = {"kind": "dry-run", "options": {"sizes": (1, 2)}}
    job = JobConfig(engine=engine, prompt={"chat_template_kwargs": {"today": today}})
    pair.run.send(Open.of(job))
    got = pair.engine.recv().job
    assert got == job
    assert got.prompt.chat_template_kwargs["today"] == today
    pair.run.send(Close())
    assert pair.engine.recv() == Close()


def test_a_message_larger_than_the_socket_arrives_whole(pair: Pair) -> None:
    image = Image.new("RGB", (64, 64), "red")
    text = string.ascii_letters * 100_000
    messages = [{"role": "user", "content": [image, text]}]
    with ThreadPoolExecutor(1) as thread:
        request = Request(Row(0, "", {}), messages, None, {}, "")
        sending = thread.submit(pair.run.send, Submit(7, request))
        got = pair.engine.recv().request
        sending.result()
    assert seen(got.messages) == seen(messages)


def test_values_of_other_classes_arrive_as_plain_ones(pair: Pair) -> None:
    class Text(str):
        pass

    sent = [Text("tea"), np.float64(0.5), MappingProxyType({"a": 1}), (1, 2)]
    assert pair.content(sent) == ["tea", 0.5, {"a": 1}, [1, 2]]


UNSENDABLE: dict[str, Any] = {
    "type object": object(),
    "type int64": np.int64(3),
    "serialize ints": 2**64,
    "surrogates not allowed": "a\udcffb",
    "it holds a lock": Locked(),
}


@pytest.mark.parametrize("words", UNSENDABLE)
def test_what_can_not_be_sent_is_refused_and_the_next_message_arrives(
    pair: Pair, words: str
) -> None:
    with pytest.raises(Unsendable, match=words):
        pair.content([Image.new("RGB", (8, 8)), UNSENDABLE[words]])
    assert pair.content(["tea"]) == ["tea"]


@pytest.mark.parametrize(
    ("sent", "from_run"),
    [
        (Died(FAULT, None), True),
        (Close(), False),
        (Refused(7), False),  # type: ignore[arg-type]
        (Died(Fault("odd", "x", "y"), None), False),  # type: ignore[arg-type]
        (Turn([], EngineLoad("1", 0, 0.0, 0)), False),  # type: ignore[arg-type]
    ],
    ids=["of the engine", "of the run", "number for text", "unknown kind", "text for a number"],
)
def test_only_messages_of_the_other_end_with_values_of_their_types_are_read(
    pair: Pair, sent: Any, from_run: bool
) -> None:
    sender, reader = (pair.run, pair.engine) if from_run else (pair.engine, pair.run)
    sender.send(sent)
    with pytest.raises(msgspec.ValidationError):
        reader.recv()


@pytest.mark.parametrize("part", [b"", b"\0", struct.pack("!i", 100) + b"cut off"])
def test_a_closed_end_is_the_end_also_in_the_middle_of_a_message(part: bytes) -> None:
    ours, theirs = Pipe()
    with closing(Channel(ours, OfEngine)) as channel:
        assert not channel.poll(0)
        os.write(theirs.fileno(), part)
        theirs.close()
        assert channel.poll(0)
        with pytest.raises((EOFError, OSError)):
            channel.recv()
        with pytest.raises(OSError, match="Broken pipe"):
            channel.send(Close())
