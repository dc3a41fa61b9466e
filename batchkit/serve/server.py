"""``batchkit serve`` from its start to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace

from filelock import FileLock, Timeout

from batchkit.commands import Say
from batchkit.commands.view import address_of, bound, quiet_server
from batchkit.engines.registry import require
from batchkit.errors import Interrupted, JobError, StoreError
from batchkit.execution.stop import StopRequest
from batchkit.serve.app import make_app
from batchkit.serve.keys import Key, read_keys
from batchkit.serve.lifecycle import Lifecycle
from batchkit.serve.settings import Settings
from batchkit.serve.store import Store
from batchkit.serve.webhooks import Webhooks
from batchkit.storage.job_toml import check_secrets

_OWN = ("127.0.0.1", "::1", "localhost")


def serve(settings: Settings, *, ready: Callable[[str], None], say: Say) -> None:
    """Serve until a signal; ``ready`` gets the address. SIGINT and SIGTERM let requests in flight finish.

    Raises:
        JobError: the job, the keys, the webhook or the address can't be used, or a package is missing.
        StoreError: another server has the folder, or its database can't be opened.
    """
    require(["fastapi", "uvicorn", "python_multipart"], user="batchkit serve", extra="serve")
    for model in settings.models.values():
        check_secrets(model.job)
    settings = replace(settings, keys=_keys(settings))
    with (
        held(settings),
        closing(Store(settings.database)) as store,
        closing(Webhooks(settings.webhook, store, say)) if settings.webhook else nullcontext(),
        bound(settings.host, settings.port) as listening,
        StopRequest().installed(),  # uvicorn raises its signal again when it has ended
    ):
        server = quiet_server(make_app(settings, store), ends_in_s=5)
        lifecycle = Lifecycle(settings, store, say)
        lifecycle.start()
        ready(address_of(settings.host, listening.getsockname()[1]))
        try:
            server.run(sockets=[listening])
        except Interrupted:  # this is how it ends
            pass
        finally:
            say("stopping: requests in flight are finished")
            lifecycle.close()


def _keys(settings: Settings) -> Mapping[str, Key] | None:
    if settings.key_file is not None:
        return read_keys(settings.key_file)
    if settings.host not in _OWN:
        raise JobError(
            f"--host {settings.host}: others can reach it, so keys are needed: --api-key-file FILE; the first"
            " one is made with --new-key NAME"
        )
    return None


@contextmanager
def held(settings: Settings) -> Iterator[None]:
    """The server's folder, made if it is not there, for this process alone."""
    try:
        for folder in (settings.files, settings.incoming, settings.runs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(settings.folder / "serve.lock")
        lock.acquire(blocking=False)
    except Timeout:
        raise StoreError(
            f"{settings.folder}: another server works with this folder; stop it, or give this one another"
            " (--folder)"
        ) from None
    except OSError as error:
        raise JobError(f"{settings.folder}: can't be used: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()
