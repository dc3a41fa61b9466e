"""A path that is no file is refused at once: a pipe would hang, a device has no end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.support.own_process import batchkit

FIFO, SOCKET, DEVICE = "it is a named pipe", "it is a socket", "it is a device"


def make(path: Path, kind: str) -> Path:
    if kind == FIFO:
        os.mkfifo(path)
    elif kind == SOCKET:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    return path


def write_job(folder: Path, path: str, prompt: str = 'user = "{{ q }}"') -> None:
    (folder / "job.toml").write_text(
        f'name = "a"\n[input]\npath = "{path}"\n[prompt]\n{prompt}\n[engine]\nkind = "dry-run"\n'
    )


@pytest.mark.parametrize(
    ("command", "name", "kind"),
    [
        ("run", "rows.jsonl", FIFO),
        ("validate", "rows.jsonl", FIFO),
        ("run", "rows.csv", SOCKET),
        ("run", "rows.parquet", DEVICE),
        ("run", "rows.jsonl.gz", FIFO),
    ],
)
def test_input_that_is_no_file_is_refused_at_once(
    tmp_path: Path, command: str, name: str, kind: str
) -> None:
    make(tmp_path / name, kind)
    write_job(tmp_path, name)
    ended = batchkit(command, "job.toml", cwd=tmp_path, timeout_s=20)
    assert ended.returncode == 2
    assert f"{name}: can't be read: {kind}, not a file; save the content" in ended.stderr
    assert not (tmp_path / "output").exists()


def test_pipe_among_the_files_of_a_glob_is_refused(tmp_path: Path) -> None:
    (tmp_path / "part-0.jsonl").write_text('{"q": 1}\n')
    make(tmp_path / "part-1.jsonl", FIFO)
    write_job(tmp_path, "part-*.jsonl")
    ended = batchkit("run", "job.toml", cwd=tmp_path, timeout_s=20)
    assert (ended.returncode, FIFO in ended.stderr) == (2, True)


@pytest.mark.parametrize("kind", [FIFO, DEVICE])
def test_prompt_file_that_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": 1}\n')
    make(tmp_path / "user.txt", kind)
    write_job(tmp_path, "rows.jsonl", 'user_file = "user.txt"')
    ended = batchkit("run", "job.toml", cwd=tmp_path, timeout_s=20)
    assert ended.returncode == 2
    assert f"user.txt: can't be read: {kind}, not a file" in ended.stderr
