"""Where in the user's code something went wrong, without our own frames."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from pathlib import Path

_OURS = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))
_MOST_FRAMES = 12
_MOST_CHARACTERS = 10_000


def shown_error(error: BaseException) -> str:
    """The error with its traceback."""
    shown = traceback.TracebackException.from_exception(error)
    _cut(shown)
    text = "".join(shown.format()).strip()
    return text if len(text) <= _MOST_CHARACTERS else f"…{text[-_MOST_CHARACTERS:]}"


def shown_code(thread: threading.Thread) -> str:
    """What ``thread`` is running."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "(it has ended)"
    return "".join(_users(traceback.extract_stack(frame)).format()).rstrip()


def _cut(shown: traceback.TracebackException) -> None:
    shown.stack = _users(shown.stack)
    for part in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if part is not None:
            _cut(part)


def _users(stack: traceback.StackSummary) -> traceback.StackSummary:
    frames = [frame for frame in stack if not frame.filename.startswith(_OURS)]
    return traceback.StackSummary.from_list(frames[-_MOST_FRAMES:])
