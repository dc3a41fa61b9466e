"""The entry point of the command ``batchkit`` and of ``python -m batchkit``.

Ctrl-C prints one line and exits with code 130, even during the imports, which take a second. There the signal handler
ends the process itself, because an exception can get lost: libraries catch it, or Python prints and then ignores it.
"""

from __future__ import annotations

import os
from types import FrameType


def main() -> None:
    try:
        import signal  # inside `try`, because it imports more modules

        # nohup makes the process ignore SIGINT.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _on_sigint)
        from batchkit.cli import cli
        from batchkit.errors import Interrupted
    except KeyboardInterrupt:
        _end()
    try:
        cli(prog_name="batchkit")
    except Interrupted:  # before or after the command itself
        _end()
    finally:  # during its shutdown, Python would print an exception and ignore it
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
