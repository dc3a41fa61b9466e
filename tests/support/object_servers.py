"""Real object stores on this machine, each with one empty bucket, and the settings with which obstore reaches them.

moto
    S3 in Python, in memory (https://docs.getmoto.org). No signature is checked. Its packages are installed once into
    the cache folder, because botocore needs an older python-dateutil than the tests' environment has:
    ``pip install --no-deps --target FOLDER`` with ``MOTO_PACKAGES``, then ``python -m tests.support.moto_server PORT``.

Azurite
    Microsoft's emulator of Azure Blob Storage, in memory (https://github.com/Azure/Azurite). It needs Node.js. The
    package is installed once into the cache folder: ``npm install azurite@3.35.0`` (190 MB), then
    ``node node_modules/azurite/dist/src/blob/main.js --blobPort PORT --inMemoryPersistence --skipApiVersionCheck``. The
    account and its key are those of every Azurite.

Ceph
    S3 by Ceph's RADOS gateway, of Debian's packages. Signatures are checked. See tests/support/ceph.py.
"""

from __future__ import annotations

import base64
import hmac
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from filelock import FileLock

from tests.support.ceph import ceph_gateway
from tests.support.paths import ROOT
from tests.support.server_process import NotInstalledError, free_port, running

MOTO_PACKAGES = (  # the other packages that moto needs are those of the tests
    "moto==5.2.5",
    "blinker==1.9.0",
    "boto3==1.44.8",
    "botocore==1.44.8",
    "flask==3.1.3",
    "flask-cors==6.0.5",
    "itsdangerous==2.2.0",
    "jmespath==1.1.0",
    "py-partiql-parser==0.6.3",
    "python-dateutil==2.9.0.post0",
    "responses==0.26.3",
    "s3transfer==0.19.3",
    "six==1.17.0",
    "werkzeug==3.1.9",
    "xmltodict==1.0.4",
)
AZURITE = "azurite@3.35.0"
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
BUCKET = "bucket"
S3_KEY, S3_SECRET = "key", "secret"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchkit"


class ObjectServer(NamedTuple):
    """A running server. ``url``: its address, for a proxy in front of it; ``store``: its bucket's address for
    obstore."""

    url: str
    store: str
    keys: Mapping[str, str]
    endpoint_key: str
    endpoint_path: str = ""

    def environment(self, url: str = "") -> dict[str, str]:
        """Return the variables with which obstore reaches the server, or the proxy at ``url``."""
        return {**self.keys, self.endpoint_key: (url or self.url) + self.endpoint_path}


@contextmanager
def object_server(name: str, folder: Path) -> Iterator[ObjectServer]:
    """Run one of ``SERVERS``, or skip the test if the server is not installed here."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(SERVERS[name](folder))
        except NotInstalledError as error:
            pytest.skip(f"no {name}: {error}")
        yield server


@contextmanager
def moto_server(folder: Path) -> Iterator[ObjectServer]:
    """Run moto's S3 server. It writes its log into ``folder``."""
    packages, port = install_moto(), free_port()
    command = [sys.executable, "-m", "tests.support.moto_server", port]
    path = os.pathsep.join((str(packages), str(ROOT)))
    with running(command, port, folder / "moto.log", PYTHONPATH=path):
        server = _s3_server(port)
        _make_bucket(server)
        yield server


@contextmanager
def azurite(folder: Path) -> Iterator[ObjectServer]:
    """Run Azurite's blob service. It writes its log into ``folder``.

    Raises:
        NotInstalledError: Node.js is missing, or npm could not install Azurite.
    """
    packages, port = install_azurite(), free_port()
    program = packages / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    command = ["node", program, "--blobHost", "127.0.0.1", "--blobPort", port]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    with running(command, port, folder / "azurite.log"):
        keys = {
            "AZURE_STORAGE_ACCOUNT_NAME": AZURITE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
            "AZURE_ALLOW_HTTP": "true",
        }
        address = f"http://127.0.0.1:{port}"
        _make_container(f"{address}/{AZURITE_ACCOUNT}/{BUCKET}")
        endpoint = ("AZURE_STORAGE_ENDPOINT", f"/{AZURITE_ACCOUNT}")
        yield ObjectServer(address, f"az://{BUCKET}", keys, *endpoint)


@contextmanager
def ceph(folder: Path) -> Iterator[ObjectServer]:
    """Run Ceph's RADOS gateway on a cluster in ``folder``.

    Raises:
        NotInstalledError: A program of Ceph is missing.
    """
    with ceph_gateway(folder, S3_KEY, S3_SECRET) as port:
        server = _s3_server(port)
        _make_bucket(server)
        yield server


SERVERS = {"moto": moto_server, "azurite": azurite, "ceph": ceph}


def install_moto() -> Path:
    """Return the folder with moto's packages. The first call in a cache installs them: 15 packages, 88 MB."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    return _cached(
        MOTO_PACKAGES[0].replace("==", "-"),
        lambda folder: subprocess.run([*pip, folder, *MOTO_PACKAGES], check=True),
    )


def install_azurite() -> Path:
    """Return the folder with Azurite's packages. The first call in a cache installs them, in half a minute."""
    missing = [tool for tool in ("node", "npm") if not shutil.which(tool)]
    if missing:
        raise NotInstalledError(f"{missing[0]} is missing; install Node.js")
    npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]

    def install(folder: Path) -> None:
        folder.mkdir()
        got = subprocess.run([*npm, "--prefix", folder, AZURITE], capture_output=True, text=True)
        if got.returncode:
            raise NotInstalledError(f"npm could not install {AZURITE}: {got.stderr.strip()[-300:]}")

    return _cached(AZURITE.replace("@", "-"), install)


def _cached(name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder ``name`` in the cache. If it isn't there, ``make`` is called with a path for it."""
    folder = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / f"{name}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                made = Path(scratch, name)
                make(made)
                made.rename(folder)
    return folder


def _make_container(url: str) -> None:
    """Make a container of Azurite, which obstore can't do. The signature is described at
    https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = [f"{name}:{value}" for name, value in headers.items()]
    resource = f"/{AZURITE_ACCOUNT}{urlsplit(url).path}"
    signed = "\n".join(["PUT", *[""] * 11, *lines, resource, "restype:container"])
    digest = hmac.digest(base64.b64decode(AZURITE_KEY), signed.encode(), "sha256")
    signature = base64.b64encode(digest).decode()
    headers["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{signature}"
    made = urllib.request.Request(f"{url}?restype=container", headers=headers, method="PUT")
    urllib.request.urlopen(made, timeout=60).close()


def _s3_server(port: int) -> ObjectServer:
    keys = {
        "AWS_ACCESS_KEY_ID": S3_KEY,
        "AWS_SECRET_ACCESS_KEY": S3_SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    return ObjectServer(f"http://127.0.0.1:{port}", f"s3://{BUCKET}", keys, "AWS_ENDPOINT_URL")


def _make_bucket(server: ObjectServer) -> None:
    """Make the bucket of an S3 server: obstore has no function for it, but signs the address."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=server.url,
        access_key_id=S3_KEY,
        secret_access_key=S3_SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
    urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=60).close()
