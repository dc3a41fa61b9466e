"""moto's S3 server as a program, ``python -m tests.support.moto_server PORT``, which answers one request at a time.

moto's own program, ``moto_server``, answers requests in several threads. It looks for the object of a create-only put
before it stores the new one, without a lock between: two puts of one key may both succeed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from threading import Lock
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import run_simple


def main(port: int) -> None:
    moto, lock = DomainDispatcherApplication(create_backend_app), Lock()

    def one_at_a_time(environ: Any, start_response: Any) -> Iterable[bytes]:
        with lock:  # between the threads of the connections
            return list(moto(environ, start_response))

    handler = MotoRequestHandler
    run_simple("127.0.0.1", port, one_at_a_time, threaded=True, request_handler=handler)


if __name__ == "__main__":
    main(int(sys.argv[1]))
