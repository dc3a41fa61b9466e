"""Temporary folders: what a killed process left is removed, what another one uses is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from batchkit.storage.files import OwnFolder, remove_orphans

OWNER = """
import time
from batchkit.storage.files import OwnFolder
print(OwnFolder("engine").path, flush=True)
time.sleep(60)
"""


def test_only_what_a_killed_process_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = OwnFolder("trial")
    (tmp_path / "batchkit-notes").mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    orphan = Path(owner.stdout.readline().strip())
    remove_orphans()
    assert orphan.is_dir()
    owner.kill()
    owner.communicate()
    remove_orphans()
    assert {*tmp_path.iterdir()} == {own.path, tmp_path / "batchkit-notes"}
    own.close()
    assert not own.path.exists()
