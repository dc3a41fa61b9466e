"""Real object stores on this machine, each with one empty bucket, and the settings with which obstore reaches them.

moto
    S3 in Python, in memory (https://docs.getmoto.org). No signature is checked. Its packages are installed once into
    the cache folder, because botocore needs an older python-dateutil than the tests' environment has:
    ``pip install --no-deps --target FOLDER`` with ``MOTO_PACKAGES``, then ``python -m tests.support.moto_server PORT``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from batchkit.isolation.child import die_with_parent
from tests.support.paths import ROOT
from tests.support.waiting import until

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
BUCKET = "bucket"
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
def moto_server(folder: Path) -> Iterator[ObjectServer]:
    """Run moto's S3 server. It writes its log into ``folder``."""
    packages, port = install_moto(), free_port()
    command = [sys.executable, "-m", "tests.support.moto_server", port]
    path = os.pathsep.join((str(packages), str(ROOT)))
    with _running(command, port, folder / "moto.log", PYTHONPATH=path):
        server = _s3_server(port, "key", "secret")
        made = urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(made, timeout=60).close()
        yield server


def install_moto() -> Path:
    """Return the folder with moto's packages. The first call in a cache installs them: 15 packages, 20 MB."""
    folder = CACHE / MOTO_PACKAGES[0].replace("==", "-")
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
                subprocess.run([*pip, f"{scratch}/new", *MOTO_PACKAGES], check=True)
                shutil.move(f"{scratch}/new", folder)
    return folder


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _s3_server(port: int, key: str, secret: str) -> ObjectServer:
    keys = {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    return ObjectServer(f"http://127.0.0.1:{port}", f"s3://{BUCKET}", keys, "AWS_ENDPOINT_URL")


@contextmanager
def _running(
    command: list[object], port: int, log: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, which answers at ``port`` when the block begins. Kill it at the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            preexec_fn=die_with_parent,
        )

    def answers() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        return False

    try:
        until(answers)
        yield process
    finally:
        process.kill()
        process.wait()
