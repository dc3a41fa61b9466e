"""Where the clips of a row are in its prompt."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.loading import make_job
from batchkit.errors import JobError, MediaError, RequestError
from batchkit.execution.retry import with_smaller_media
from batchkit.rendering.renderer import PromptRenderer
from batchkit.types import Audio, Request, Row, Video
from tests.support import clips
from tests.support.images import png
from tests.support.rendering import refusal, renderer

WAV = clips.sound(clips.tone(0.1))
ENCODED = base64.b64encode(WAV).decode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for n in (1, 2, 3):
        clips.write(tmp_path, f"{n}.mkv", clips.video(clips.frames(n)))
    clips.write(tmp_path, "a.wav", WAV)
    clips.write(tmp_path, "red.png", png())
    return tmp_path


def of_files(root: Path, **tables: Any) -> PromptRenderer:
    return renderer(media={"root": str(root)}, **tables)


def outline(request: Request) -> list[Any]:
    """The last message: texts as they are, a video as its number of frames, sound as its type, an image as "image"."""
    return [
        part["text"] if part["type"] == "text" else _in_short(part[part["type"]])
        for part in request.messages[-1]["content"]
    ]


def _in_short(found: Any) -> Any:
    if isinstance(found, Video):
        return len(found.frames)
    return Audio if isinstance(found, Audio) else "image"


TWO = ["1.mkv", "2.mkv"]
PROMPTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "before the text": ({"user": "q", "videos": TWO}, [1, 2, "q"]),
    "behind the text": ({"user": "q{{ video }}{{ video }}", "videos": TWO}, ["q", 1, 2]),
    "no text": ({"user": "", "videos": TWO}, [1, 2]),
    "no user": ({"videos": TWO}, [1, 2, "asked"]),
    "in their places": (
        {"user": "a{{ video }}b{{ video }}c", "videos": TWO},
        ["a", 1, "b", 2, "c"],
    ),
    "one without a place": ({"user": "a{{ video }}b", "videos": TWO}, [2, "a", 1, "b"]),
    "a list": ({"user": "{{ video }} and {{ video }}", "videos": ["{{ both }}"]}, [2, " and ", 3]),
    "a column of that name": (
        {"user": "{{ row.video }}: {{ video }}", "videos": ["{{ video }}"]},
        ["3.mkv: ", 3],
    ),
    "bytes": ({"user": "q", "audios": ["{{ heard }}"]}, [Audio, "q"]),
    "all kinds": (
        {
            "user": "{{ audio }}{{ c }}{{ image }}",
            "images": ["red.png", "red.png"],
            "videos": ["1.mkv"],
            "audios": ["a.wav"],
        },
        ["image", 1, Audio, "other", "image"],
    ),
    "a row that writes a place": (
        {"user": "{{ mark }}{{ video }}", "videos": ["1.mkv"]},
        ["{{ video }}<video 0>", 1],
    ),
}
FIELDS = {
    "c": "other",
    "both": ["2.mkv", "3.mkv"],
    "video": "3.mkv",
    "heard": WAV,
    "prompt": "asked",
    "mark": "{{ video }}<video 0>",
}


@pytest.mark.parametrize("case", PROMPTS)
def test_clips_are_where_the_prompt_says(case: str, root: Path) -> None:
    prompt, expected = PROMPTS[case]
    request = of_files(root, prompt=prompt).render(Row(0, "0", FIELDS))

    assert outline(request) == expected
    clip_bytes = sum(clip.n_bytes for clip in request.all_clips)
    assert request.media_bytes == clip_bytes + 4 * sum(i.width * i.height for i in request.images)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "video_url", "video_url": {"url": "2.mkv"}}, 2),
        ({"type": "video_url", "video_url": "2.mkv"}, 2),
        ({"type": "video", "video": "3.mkv"}, 3),
        ({"type": "audio_url", "audio_url": {"url": "a.wav"}}, Audio),
        ({"type": "audio", "audio": {"bytes": WAV, "path": None}}, Audio),
        ({"type": "video", "video": {"bytes": None, "path": "2.mkv"}}, 2),
        ({"type": "input_audio", "input_audio": {"data": ENCODED, "format": "wav"}}, Audio),
    ],
)
@pytest.mark.parametrize("place", ["messages", "body"])
def test_messages_bring_their_own(
    part: dict[str, Any], expected: Any, place: str, root: Path
) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "q"}, part]}]
    fields: Mapping[str, Any] = {"messages": messages}
    if place == "body":
        fields = {"body": {**fields, "model": "m"}}
    assert outline(of_files(root).render(Row(0, "0", fields))) == ["q", expected]


def test_a_plain_prompt_has_them_beside_it(root: Path) -> None:
    prompt = {"chat": False, "user": "<|video|>", "videos": TWO, "audios": ["a.wav"]}
    request = of_files(root, prompt=prompt).render(Row(0, "0", {}))

    assert (request.messages, request.prompt) == (None, "<|video|>")
    assert {_in_short(clip) for clip in request.clips} == {1, 2, Audio}
    assert request.media_bytes == sum(clip.n_bytes for clip in request.clips)


def test_rows_that_name_the_same_clip_share_it(root: Path) -> None:
    made = of_files(root, prompt={"user": "q", "videos": ["2.mkv"], "audios": ["2.wav"]})
    clips.write(root, "2.wav", WAV)
    first, second = (made.render(Row(n, str(n), {})) for n in range(2))
    assert [*map(id, first.all_clips)] == [*map(id, second.all_clips)]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"user": "{{ video }}{{ video }}", "videos": ["1.mkv"]}, "has more {{ video }} than"),
        ({"user": "{{ image }}{{ image }}", "images": ["red.png"]}, "has more {{ image }} than"),
        ({"user": "q", "videos": ["{{ none }}"]}, "the row names no video"),
        ({"user": "q", "audios": ["{{ none }}"]}, "the row names no audio"),
        ({"user": "q", "videos": ["{{ three }}"]}, "video 3 (int): can't be used as a video"),
        ({"user": "q", "audios": ["red.png"]}, "red.png: is not a readable clip"),
        ({"user": "q", "videos": ["x.mkv"]}, "x.mkv: no such file"),
    ],
)
def test_what_is_wrong_with_a_clip_is_its_rows_error(
    prompt: dict[str, Any], words: str, root: Path
) -> None:
    kind = RequestError if "has more" in words else MediaError
    fields = {"none": None, "three": 3}
    assert words in refusal(kind, fields, prompt=prompt, media={"root": str(root)})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"media": {"num_frames": 4, "fps": 1}}, "keep one"),
        (
            {"engine": {"kind": "transformers", "model": "m"}, "prompt": {"videos": ["{{ a }}"]}},
            'prompt.videos: engine.kind "transformers" does not support videos',
        ),
    ],
)
def test_a_job_that_can_not_take_clips_is_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        make_job(tables, "test")


@pytest.mark.parametrize("chat", [True, False])
def test_a_row_that_ran_out_of_memory_gets_fewer_frames(chat: bool, root: Path) -> None:
    prompt = {"chat": chat, "user": "q", "videos": ["3.mkv"], "audios": ["a.wav"]}
    request = of_files(root, prompt=prompt).render(Row(0, "0", {}))
    smaller = with_smaller_media(request).all_clips
    sound, shown = sorted(smaller, key=lambda it: isinstance(it, Video))
    assert (shown.indexes, len(shown.frames), len(sound.samples)) == ([0, 2], 2, 1600)
