"""``python -m batchkit``, and the command ``batchkit``.

Ctrl-C is one line and exit code 130 from the first import on. Those take a second, and while one is
going on an exception is no way out: libraries catch it, or Python reports and then ignores it.
"""

from __future__ import annotations

import os
from types import FrameType


def main() -> None:
    try:
        import signal  # which imports more itself

        if (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):  # under nohup it is ignored
            signal.signal(signal.SIGINT, _on_sigint)
        from batchkit.cli import cli
        from batchkit.execution.signals import Interrupted
    except KeyboardInterrupt:
        _end()
    try:
        cli(prog_name="batchkit")
    except Interrupted:  # outside of any command
        _end()
    finally:  # Python reports an exception that strikes while it shuts down
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _on_sigint(signum: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end()
        frame = frame.f_back
    from batchkit.execution.signals import Interrupted

    raise Interrupted(signum)


def _end() -> None:
    os.write(2, b"batchkit: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
