"""The image without a GPU, built by buildah from its Dockerfile on Debian's files. No container engine runs here, so
``buildah run`` takes the place of ``docker run``."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.chat_server import serving
from tests.support.environments import wheel
from tests.support.how_to import run_page
from tests.support.paths import ROOT

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

BASE = "debian:bookworm-slim"
PIP = Path("/etc/pip.conf")


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command with a store of its own, which has the image that the Dockerfile begins with."""
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing; apt-get install {program}")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    folder = tmp_path_factory.mktemp("images")
    places = ["--root", folder / "root", "--runroot", folder / "run"]
    command = shlex.join(["buildah", *map(str, places), "--storage-driver", "vfs"])
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", folder / "debian"], check=True)
    # The base image trusts what this machine trusts, and has its settings of pip.
    trusted = Path("usr/local/share/ca-certificates")
    shutil.copytree(Path("/") / trusted, folder / "debian" / trusted, dirs_exist_ok=True)
    if PIP.exists():
        shutil.copy(PIP, folder / "debian" / "etc")
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    words = f"{command} bud -t {BASE} -f {folder}/Dockerfile {folder}/debian"
    subprocess.run(words.split(), check=True)
    return command


def test_the_page(buildah: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    wheel(tmp_path / "dist", "")
    (tmp_path / "reviews.csv").write_text("review\nThe tea was hot.\nCold tea.\n")
    with serving() as server:
        replaced = {
            "make dist": "true",  # the wheel is there
            "docker build": f"{buildah} bud --isolation chroot --pull-never",
            "-t batchkit-cpu .": f"-t batchkit-cpu . && {buildah} from --name cpu batchkit-cpu",
            'docker run --rm -v "$PWD:/data" batchkit-cpu': (
                f'{buildah} run --isolation chroot -v "$PWD:/data" cpu batchkit'
            ),
            "http://gpu-1:8000/v1": server.url,
            "Qwen/Qwen3-8B": "tiny",
        }
        printed = run_page("docker", tmp_path, replaced=replaced, timeout_s=1200)
    assert "2 ok, 0 failed of 2 rows" in printed
    answers = pq.read_table(tmp_path / "answers.parquet")
    assert answers["text"][1].as_py().endswith("Cold tea.")
