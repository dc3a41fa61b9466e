"""Requests have the same hash if, and only if, everything that decides their answers is equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from batchkit.rendering.request_hash import RequestHashes, is_determined
from batchkit.types import Audio, Call, Cut, Pair, Request, Row, Speech, Video, VideoFile
from tests.support import clips
from tests.support.dry_runs import job
from tests.support.images import BLUE, RED
from tests.support.rendering import renderer

ROW = Row(0, "0", {})
TEXT = Request(ROW, [{"role": "user", "content": "hello"}], None, {"temperature": 0}, "input")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def hash_of(request: Request, **tables: Any) -> str:
    found = RequestHashes(job(**tables)).hashed(request)
    assert replace(found, request_hash="") == request
    return found.request_hash


def with_part(kind: str, value: Any) -> Request:
    content = [{"type": kind, kind: value}, {"type": "text", "text": "what is it?"}]
    return replace(TEXT, messages=[{"role": "user", "content": content}])


def picture(color: Any = RED, size: tuple[int, int] = (4, 2), mode: str = "RGB") -> Request:
    return with_part("image_pil", Image.new(mode, size, color))


def sound(samples: Any = (0, 0.5), rate: int = 16000) -> Request:
    return with_part("audio", Audio(np.array(samples, np.float32), rate))


def film(
    seed: int = 0,
    n: int = 4,
    fps: float = 8.0,
    duration_s: float = 1.0,
    total: int = 8,
    first: int = 0,
) -> Request:
    frames = clips.frames(n, seed=seed, size=(32, 16))
    indexes = [first + k for k in range(n)]
    video = Video(frames, fps, duration_s, total, indexes, [k / fps for k in indexes])
    return with_part("video", video)


def file(data: bytes = b"data", type: str = "video/mp4") -> Request:
    return with_part("video", VideoFile(data, type))


def plain(**keys: Any) -> Request:
    return replace(TEXT, messages=None, prompt="hello", **keys)


DIFFERENT: dict[str, Request] = {
    "text": TEXT,
    "other text": replace(TEXT, messages=[{"role": "user", "content": "hello!"}]),
    "other role": replace(TEXT, messages=[{"role": "system", "content": "hello"}]),
    "two messages": replace(TEXT, messages=[*TEXT.messages, *TEXT.messages]),
    "plain": plain(),
    "note": replace(TEXT, messages=[*TEXT.messages, {"role": "user", "content": "again"}]),
    "temperature": replace(TEXT, sampling={"temperature": 1}),
    "seed": replace(TEXT, sampling={"temperature": 0, "seed": 1}),
    "other seed": replace(TEXT, sampling={"temperature": 0, "seed": 2}),
    "max_tokens": replace(TEXT, sampling={"temperature": 0, "max_tokens": 9}),
    "n": replace(TEXT, sampling={"temperature": 0, "n": 2}),
    "schema": replace(
        TEXT, sampling={"temperature": 0, "structured_outputs": {"json": {"type": "object"}}}
    ),
    "other schema": replace(
        TEXT, sampling={"temperature": 0, "structured_outputs": {"json": {"type": "array"}}}
    ),
    "adapter": replace(TEXT, lora="a"),
    "other adapter": replace(TEXT, lora="b"),
    "base model of adapters": replace(TEXT, lora=""),
    "tools": replace(TEXT, tools=[TOOL]),
    "two tools": replace(TEXT, tools=[TOOL, TOOL]),
    "tool_choice": replace(TEXT, tools=[TOOL], tool_choice="required"),
    "one tool at a time": replace(TEXT, tools=[TOOL], parallel_tool_calls=False),
    "template": replace(TEXT, chat_template_kwargs={"enable_thinking": False}),
    "endpoint": replace(TEXT, endpoint="chat/completions"),
    "pair": replace(TEXT, messages=None, pair=Pair("a", ["b"], is_list=False)),
    "list": replace(TEXT, messages=None, pair=Pair("a", ["b"], is_list=True)),
    "other pair": replace(TEXT, messages=None, pair=Pair("a", ["c"], is_list=False)),
    "image": picture(),
    "blue image": picture(BLUE),
    "grey image": picture(0, mode="L"),
    "large image": picture(size=(2, 4)),
    "sound": sound(),
    "other sound": sound((0, 0.25)),
    "slower sound": sound(rate=8000),
    "video": film(),
    "other video": film(seed=1),
    "short video": film(n=3),
    "slow video": film(fps=4),
    "long video": film(duration_s=2),
    "video of more frames": film(total=9),
    "later frames": film(first=1),
    "file": file(),
    "other file": file(b"other"),
    "file of another type": file(type="video/webm"),
    "clip": plain(clips=[Audio(np.zeros(4, np.float32), 16000)]),
    "other clip": plain(clips=[Audio(np.ones(4, np.float32), 16000)]),
    "speech": plain(speech=Speech("en")),
    "other language": plain(speech=Speech("de")),
}


def all_hashes() -> dict[str, str]:
    hashes = RequestHashes(job())
    return {name: hashes.hashed(request).request_hash for name, request in DIFFERENT.items()}


def test_everything_that_decides_the_answer_changes_the_hash() -> None:
    found = all_hashes()
    assert all(len(one) == 32 and int(one, 16) for one in found.values())
    by_hash = {one: name for name, one in found.items()}
    assert by_hash.keys() == set(found.values())
    assert [by_hash[one] for one in found.values()] == list(found)


@pytest.mark.parametrize(
    "keys",
    [
        {"row": Row(5, "other", {"column": 1})},
        {"input_hash": "other"},
        {"attempt": 2},
        {"media_bytes": 7},
        {"cut": Cut(3, 4, 5)},
        {"request_hash": "old"},
        {"call": Call("step", 3)},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_what_does_not_reach_the_engine_does_not_change_it(keys: dict[str, Any]) -> None:
    hashes = RequestHashes(job())
    assert hashes.hashed(replace(TEXT, **keys)).request_hash == hash_of(TEXT)


ENGINES: dict[str, dict[str, Any]] = {
    "usual": {},
    "model": {"model": "other"},
    "revision": {"options": {"revision": "main"}},
    "adapters": {"lora": "folder"},
}


def test_the_engine_and_its_model_change_the_hash() -> None:
    base = {"kind": "dry-run", "model": "one"}
    found = [hash_of(TEXT, engine=base | more) for more in ENGINES.values()]
    found.append(
        hash_of(TEXT, engine={"kind": "openai-server", "model": "one", "base_url": "http://x/v1"})
    )
    assert len(set(found)) == len(found)


def test_the_engine_of_a_step_changes_the_hash() -> None:
    steps = [
        {"name": "a", "prompt": {"user": "x"}},
        {"name": "b", "prompt": {"user": "x"}, "engine": "judge"},
    ]
    engines = {"judge": {"kind": "dry-run", "model": "two"}}
    hashes = RequestHashes(job(steps=steps, engines=engines))
    asked = [replace(TEXT, call=Call("a", 0, engine)) for engine in ("", "judge")]
    one, other = (hashes.hashed(request).request_hash for request in asked)
    assert one != other


def test_the_same_image_in_two_files_has_one_hash(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20), RED).save(tmp_path / "a.png", compress_level=0)
    Image.new("RGB", (40, 20), RED).save(tmp_path / "b.png", compress_level=9)
    Image.new("RGB", (40, 20), BLUE).save(tmp_path / "c.png")
    made = renderer(
        prompt={"user": "what?", "images": ["{{ file }}"]}, media={"root": str(tmp_path)}
    )
    hashes = RequestHashes(made.job)
    a, b, c = (
        hashes.hashed(made.render(Row(n, "", {"file": f"{name}.png"}))).request_hash
        for n, name in enumerate("abc")
    )
    assert a == b != c


def test_equal_clips_in_two_objects_have_one_hash() -> None:
    for make in (picture, sound, film, file):
        assert hash_of(make()) == hash_of(make())


def test_a_value_that_msgpack_lacks_has_a_hash() -> None:
    for name in ("\ud800", 2**70):
        one, other = (replace(TEXT, sampling={"x": value}) for value in (name, "other"))
        assert hash_of(one) != hash_of(other)


def test_a_hash_is_the_same_in_another_process() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
    )
    assert json.loads(done.stdout) == all_hashes()


class CountedImage(Image.Image):
    """An image that counts how often its pixels are read."""

    n_read = 0

    def tobytes(self, *args: Any, **keys: Any) -> bytes:
        self.n_read += 1
        return super().tobytes(*args, **keys)


def counted(color: tuple[int, int, int]) -> CountedImage:
    made = Image.new("RGB", (4, 2), color)
    made.__class__ = CountedImage
    assert isinstance(made, CountedImage)
    return made


def test_an_image_of_many_requests_is_read_once() -> None:
    hashes, image = RequestHashes(job()), counted(RED)
    found = {hashes.hashed(with_part("image_pil", image)).request_hash for _ in range(5)}
    assert image.n_read == 1
    assert len(found) == 1


def test_an_image_that_takes_the_place_of_another_in_memory_has_its_own_hash() -> None:
    hashes = RequestHashes(job())
    requests = (with_part("image_pil", counted((n, 0, 0))) for n in range(50))
    assert len({hashes.hashed(request).request_hash for request in requests}) == 50


def test_threads_may_share_the_hashes() -> None:
    hashes = RequestHashes(job())
    many = [*DIFFERENT.values()] * 20
    with ThreadPoolExecutor(4) as pool:
        found = [one.request_hash for one in pool.map(hashes.hashed, many)]
    assert found == [hashes.hashed(request).request_hash for request in many]


@pytest.mark.parametrize(
    ("sampling", "determined"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 1e-6}, True),
        ({"temperature": 0.1}, False),
        ({}, False),
        ({"temperature": None}, False),
        ({"temperature": 0.1, "seed": 0}, True),
        ({"seed": None}, False),
        ({"seed": 7}, True),
    ],
)
def test_an_answer_is_determined_if_it_is_greedy_or_has_a_seed(
    sampling: dict[str, Any], determined: bool
) -> None:
    request = replace(TEXT, sampling=sampling)
    assert is_determined(request, generates=True) == determined
    assert is_determined(request, generates=False)


if __name__ == "__main__":
    print(json.dumps(all_hashes()))
