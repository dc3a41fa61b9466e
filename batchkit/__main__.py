"""``python -m batchkit``, and the command ``batchkit``.

From the first import on, Ctrl-C prints one line and exits with code 130. The imports take a second,
and an exception can't stop them: libraries catch it, or Python reports it and then ignores it.
"""

from __future__ import annotations

import os
from types import FrameType


def main() -> None:
    try:
        import signal  # it imports more modules

        if (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):  # nohup sets it to ignored
            signal.signal(signal.SIGINT, _on_sigint)
        from batchkit.cli import cli
        from batchkit.errors import Interrupted
    except KeyboardInterrupt:
        _end()
    try:
        cli(prog_name="batchkit")
    except Interrupted:  # outside of any command
        _end()
    finally:  # Python reports an exception raised during its shutdown
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _on_sigint(signum: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end()
        frame = frame.f_back
    from batchkit.errors import Interrupted

    raise Interrupted(signum)


def _end() -> None:
    os.write(2, b"batchkit: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
