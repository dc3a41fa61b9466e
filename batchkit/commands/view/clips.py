"""Sound and video of prompts for a page's players: the bytes of a row's own clip, or a part of them."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from batchkit.errors import MediaError
from batchkit.rendering.media import shown
from batchkit.runs.reach import Reach

MAX_CLIP_BYTES = 500_000  # of one that is put into a page
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_TYPES = {  # what browsers play, by how it begins; audio or video where either may be inside
    re.compile(rb"RIFF....WAVE", re.DOTALL): "audio/wav",
    re.compile(rb"fLaC"): "audio/flac",
    re.compile(rb"OggS"): "{kind}/ogg",
    re.compile(rb"....ftyp", re.DOTALL): "{kind}/mp4",
    re.compile(rb"\x1a\x45\xdf\xa3"): "{kind}/webm",
    re.compile(rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xfd]"): "audio/mpeg",
    re.compile(rb"\xff[\xf0\xf1\xf8\xf9]"): "audio/aac",
}


class PlayableClip(NamedTuple):
    """``content`` has a browser's name of its type; no other than a clip's."""

    content: bytes
    type: str

    @property
    def uri(self) -> str:
        return f"data:{self.type};base64,{base64.b64encode(self.content).decode()}"

    def answer(self, asked: str | None) -> tuple[int, bytes, dict[str, str]]:
        """The status, the content and the headers that answer a request for the range ``asked``; of several ranges, or
        one that makes no sense, it is all (RFC 9110, 14.2)."""
        headers, size = {"accept-ranges": "bytes"}, len(self.content)
        if (found := _RANGE.fullmatch(asked or "")) is None or found[0] == "bytes=-":
            return 200, self.content, headers
        first, last = found[1], found[2]
        start = int(first) if first else max(0, size - int(last))
        end = min(int(last), size - 1) if first and last else size - 1
        if start > end:
            return 416, b"", {**headers, "content-range": f"bytes */{size}"}
        headers["content-range"] = f"bytes {start}-{end}/{size}"
        return 206, self.content[start : end + 1], headers


def clip_of(kind: str, source: Any, reach: Reach) -> PlayableClip:
    """The clip at ``source``, not decoded. Nothing is opened here that the run would have refused.

    Raises:
        MediaError: it can't be read, a reader may not open it, or no browser plays it.
    """
    content = reach.clip(source)
    for mark, name in _TYPES.items():
        if mark.match(content[:64]):
            return PlayableClip(content, name.format(kind=kind))
    raise MediaError(f"{shown(source, kind)}: browsers don't play this kind of file")


def in_page(kind: str, source: Any, reach: Reach) -> Mapping[str, Any]:
    """{kind, name, src} of a clip that is small enough to be in a page; else {kind, name, problem}."""
    about = {"kind": kind, "name": shown(source, kind)}
    try:
        made = clip_of(kind, source, reach)
    except MediaError as error:
        return {**about, "problem": str(error)}
    if len(made.content) > MAX_CLIP_BYTES:
        text = f"{about['name']}: too long for this page; `batchkit view` plays it"
        return {**about, "problem": text}
    return {**about, "src": made.uri}
