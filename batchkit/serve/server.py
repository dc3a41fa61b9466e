"""The process of ``batchkit serve``, from start to end."""

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
    """Serve until SIGINT or SIGTERM, then let running requests finish. ``ready`` is called with the server's address.

    Raises:
        JobError: The job, the keys, the webhook or the address can't be used, or a package is missing.
        StoreError: Another server uses the folder, or its database can't be opened.
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
        except Interrupted:  # the normal way for the server to end
            pass
        finally:
            say("stopping after the running requests have finished")
            lifecycle.close()


def _keys(settings: Settings) -> Mapping[str, Key] | None:
    if settings.key_file is not None:
        return read_keys(settings.key_file)
    if settings.host not in _OWN:
        raise JobError(
            f"--host {settings.host}: other machines can reach this address, so API keys are required; give"
            " --api-key-file FILE, and create the first key with --new-key NAME"
        )
    return None


@contextmanager
def held(settings: Settings) -> Iterator[None]:
    """Create the server's folder if it is missing, and lock it for this process."""
    try:
        for folder in (settings.files, settings.incoming, settings.runs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(settings.folder / "serve.lock")
        lock.acquire(blocking=False)
    except Timeout:
        raise StoreError(
            f"{settings.folder}: another server works with this folder; stop it, or choose another folder"
            " (--folder)"
        ) from None
    except OSError as error:
        raise JobError(
            f"{settings.folder}: can't be used: {error.strerror}; choose another folder (--folder)"
        ) from error
    try:
        yield
    finally:
        lock.release()
