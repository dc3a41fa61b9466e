"""Pictures in terminals that can show them: kitty's graphics protocol, and iTerm2's."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

_SIZE = (480, 320)  # pixels
_CHUNK = 4096  # bytes, kitty's limit: https://sw.kovidgoyal.net/kitty/graphics-protocol/


def drawn(image: Image, environ: Mapping[str, str]) -> str | None:
    """What makes the terminal draw a small copy of ``image``; None if it is not known to be able to.

    tmux and screen don't pass it through.
    """
    program = environ.get("TERM_PROGRAM", "")
    if "TMUX" in environ or environ.get("TERM", "").startswith(("screen", "tmux", "dumb")):
        return None
    if "KITTY_WINDOW_ID" in environ or program == "ghostty":
        return _for_kitty(_png(image))
    if program in ("iTerm.app", "WezTerm") or environ.get("LC_TERMINAL") == "iTerm2":
        return _for_iterm(_png(image))
    return None


def _png(image: Image) -> bytes:
    small = image.copy()
    small.thumbnail(_SIZE)
    file = io.BytesIO()
    small.save(file, "PNG")
    return file.getvalue()


def _for_kitty(png: bytes) -> str:
    data = base64.b64encode(png).decode()
    chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
    parts = []
    for n, chunk in enumerate(chunks):
        what = "a=T,f=100," if n == 0 else ""
        parts.append(f"\x1b_G{what}m={int(n < len(chunks) - 1)};{chunk}\x1b\\")
    return "".join(parts)


def _for_iterm(png: bytes) -> str:
    """https://iterm2.com/documentation-images.html"""
    data = base64.b64encode(png).decode()
    return f"\x1b]1337;File=inline=1;size={len(png)};preserveAspectRatio=1:{data}\x07"
