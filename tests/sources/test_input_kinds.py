"""A path that is no file is refused at once: a pipe would hang, a device has no end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.support.own_process import batchkit

FIFO, SOCKET, DEVICE = "it is a named pipe", "it is a socket", "it is a device"


def make(path: Path, kind: str) -> None:
    if kind == FIFO:
        os.mkfifo(path)
    elif kind == SOCKET:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("command", "path", "name", "kind"),
    [
        ("run", "rows.jsonl", "rows.jsonl", FIFO),
        ("validate", "rows.jsonl", "rows.jsonl", FIFO),
        ("run", "rows.csv", "rows.csv", SOCKET),
        ("run", "rows.parquet", "rows.parquet", DEVICE),
        ("run", "rows.jsonl.gz", "rows.jsonl.gz", FIFO),
        ("run", "part-*.jsonl", "part-1.jsonl", FIFO),
        ("run", "part-0.jsonl", "user.txt", FIFO),
        ("run", "part-0.jsonl", "user.txt", DEVICE),
    ],
)
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, command: str, path: str, name: str, kind: str
) -> None:
    (tmp_path / "part-0.jsonl").write_text('{"q": 1}\n')
    if name != "user.txt":
        (tmp_path / "user.txt").write_text("{{ q }}")
    make(tmp_path / name, kind)
    (tmp_path / "job.toml").write_text(
        f'name = "a"\n[input]\npath = "{path}"\n[prompt]\nuser_file = "user.txt"\n[engine]\nkind = "dry-run"\n'
    )
    ended = batchkit(command, "job.toml", cwd=tmp_path, timeout_s=20)
    assert ended.returncode == 2
    assert f"{name}: can't be read: {kind}, not a file" in ended.stderr
    assert not (tmp_path / "output").exists()
