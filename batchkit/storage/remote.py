"""Files of exports at an address: they are written to a temporary folder, and then sent by fsspec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from batchkit.config.export_target import HUB, is_dataset
from batchkit.config.urls import bare, failure, is_remote
from batchkit.errors import BatchkitError, JobError, UploadError
from batchkit.storage.files import OwnFolder, replacing

Say = Callable[[str], None]


def check_address(address: str, key: str) -> None:
    """Raise JobError if fsspec can't open the store of ``address``, for example because a package is missing."""
    import fsspec

    try:
        fsspec.core.url_to_fs(address)
    except Exception as error:  # each store's library has its own exceptions
        raise JobError(
            f"{key}: {bare(address)}: can't be written to: {failure(error, address)}"
        ) from error


def file_address(address: str, name: str) -> str:
    """Return the address of a file named ``name``, if ``address`` is a dataset on the hub without a file; otherwise
    return ``address``."""
    return f"{address.rstrip('/')}/data/{name}" if is_dataset(address) else address


@contextmanager
def sending(address: str) -> Iterator[tuple[Path, Callable[[Say], Say]]]:
    """Yield a path in a temporary folder. When the block ends, each file in that folder is sent to the folder of
    ``address``. Errors inside the block name the address instead of the temporary folder.

    The second value is a function that does the same for messages: it returns a function that passes them on.

    Raises:
        UploadError: A file could not be sent. Earlier files were sent.
    """
    name = PurePosixPath(address).name
    with closing(OwnFolder("export")) as own:
        folder = own.path / "files"
        folder.mkdir()

        def shown(text: str) -> str:
            return text.replace(str(folder), bare(address).removesuffix(f"/{name}"))

        try:
            yield folder / name, lambda say: lambda text: say(shown(text))
        except BatchkitError as error:
            error.args = (shown(str(error)),)
            raise
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            place = f"{address.removesuffix(name)}{file.relative_to(folder)}"
            with upload_errors(place, "correct this and run `batchkit export` again"):
                send(file, place)


def send(file: Path, address: str) -> None:
    """Send ``file`` to ``address``. If that is in a dataset on the hub that does not exist, create it as a private one.
    Raises the exceptions of the store's library."""
    import fsspec

    fs, path = fsspec.core.url_to_fs(address)
    if address.startswith(HUB):
        from huggingface_hub import HfApi

        owner, name = address.removeprefix(HUB).split("/")[:2]
        HfApi().create_repo(f"{owner}/{name}", repo_type="dataset", private=True, exist_ok=True)
        fs.invalidate_cache()  # it may have noted that there is no such dataset
    fs.put_file(str(file), path)


@contextmanager
def upload_errors(address: str, advice: str) -> Iterator[None]:
    """Raise UploadError, with the ``address`` and ``advice``, if the block raises an exception of the store's
    library."""
    try:
        yield
    except BatchkitError:
        raise
    except Exception as error:  # each store's library has its own exceptions
        raise UploadError(
            f"{bare(address)}: not written: {failure(error, address)}; {advice}"
        ) from error


class OutputFolder:
    """A folder that gets files, local or at an address.

    A local file is renamed into place. Object stores and the hub show an upload only once it is complete. Other stores
    may show a part of a file, so a reader must check that a file is whole.

    Methods raise the exceptions of the store's library.
    """

    def __init__(self, place: str) -> None:
        import fsspec

        self._place = place
        self._fs, self._path = fsspec.core.url_to_fs(place)

    def names(self) -> set[str]:
        """Return the names of the folder's files. A missing folder has no files."""
        self._fs.invalidate_cache()
        try:
            return {PurePosixPath(path).name for path in self._fs.ls(self._path, detail=False)}
        except FileNotFoundError:
            return set()

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        found: AbstractContextManager[BinaryIO] = self._fs.open(f"{self._path}/{name}", "rb")
        return found

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield a path for the new content of a file. When the block ends, the file gets this content."""
        if not is_remote(self._place):
            path = Path(self._place, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f".{name}.*.tmp"):  # of a process that was killed
                left.unlink(missing_ok=True)
            with replacing(path) as temporary:
                yield temporary
            return
        with closing(OwnFolder("export")) as own:
            yield own.path / name
            send(own.path / name, f"{self._place}/{name}")

    def remove(self, name: str) -> None:
        self._fs.rm_file(f"{self._path}/{name}")
