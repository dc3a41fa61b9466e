"""``export --parquet --hub``: the table and its card are pushed, to a server that speaks the hub's API."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.command_line import batchkit as in_this_process
from tests.support.dry_runs import RUN, run, write_job, write_rows
from tests.support.hub_server import COMMIT, HubServer, hub
from tests.support.own_process import batchkit

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def make_run() -> None:
    write_rows([{"q": "x", "key": "a"}, {"key": "b"}, {"q": "y", "key": "c"}])
    write_job(
        engine={"model": "/home/someone/models/Qwen3-VL-8B"},
        vars={"api_key": "sk-very-secret-123456"},
        prompt={"system": "Use ``` never."},
    )
    assert run().exit_code == 3


def push(server: HubServer, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": server.token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(Path("hf").absolute()),
    }
    options = args or ("--hub", "me/answers")
    return batchkit(
        *("export", str(RUN), "--parquet", *options),
        cwd=Path.cwd(),
        start=subprocess.Popen,
        **{**known, **environment},
    )


def visibility(created: dict[str, Any]) -> str:
    """By the name that the client's version uses."""
    return created.get("visibility") or ("private" if created["private"] else "public")


def test_the_table_and_a_card_without_secrets_are_pushed_in_one_commit() -> None:
    make_run()
    with hub() as server:
        ended = push(server)
        assert ended.returncode == 0, ended.stderr
        assert f"{server.url}/datasets/me/answers (commit {COMMIT[:12]})" in ended.stdout
        assert server.messages == ["Answers of the run a"]
        assert server.files.keys() == {"README.md", "data/a.parquet"}
        again = push(server, "--hub", "me/answers", "--public")  # replaces the table
        assert again.returncode == 0, again.stderr
    assert len(server.messages) == 2
    assert [(one["type"], visibility(one)) for one in server.created] == [
        ("dataset", "private"),
        ("dataset", "public"),
    ]
    table = pq.read_table(io.BytesIO(server.files["data/a.parquet"]))
    assert table.equals(pq.read_table(RUN / "results.parquet"))
    assert table["status"].to_pylist() == ["ok", "failed", "ok"]
    card = server.files["README.md"].decode()
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head)["configs"] == [
        {"config_name": "default", "data_files": "data/a.parquet"}
    ]
    for line in (
        "| model | Qwen3-VL-8B |",
        "| rows | 3 |",
        "| answered | 2 |",
        "| failed: template | 1 |",
        'user = "{{ q }}"',
        'kind = "dry-run"',
    ):
        assert line in text, text
    assert "batchkit 0" in text
    assert "````toml\n" in text, "the prompt has three backticks"
    for private in ("sk-very-secret", server.token, "/home/someone", str(Path.cwd())):
        assert private not in card


@pytest.mark.parametrize(
    ("args", "environment", "words"),
    [
        (("--hub", "you/answers"), {}, "don't have the rights"),
        (("--hub", "me/answers"), {"HF_TOKEN": "hf_" + "y" * 30}, "401"),
        (("--hub", "me/answers"), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "Connect"),
        (("--hub", "me/answers"), {"HF_HUB_OFFLINE": "1"}, "offline mode"),
    ],
)
def test_what_the_hub_refuses_leaves_the_table_here(
    args: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    make_run()
    with hub() as server:
        ended = push(server, *args, **environment)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert f"--hub {args[1]}: not pushed" in ended.stderr
    assert words in ended.stderr
    assert pq.read_table(RUN / "results.parquet").num_rows == 3
    assert not server.files


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--parquet", "--hub", "answers"], "dataset: --hub OWNER/NAME"),
        (["--parquet", "--hub", "a/b/c"], "--hub a/b/c: "),
        (["--csv", "--hub", "me/answers"], "give --parquet, too"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_written(
    args: list[str], words: str
) -> None:
    make_run()
    found = in_this_process("export", str(RUN), *args)
    assert (found.exit_code, words in found.stderr) == (2, True), found.stderr
    assert not list(RUN.glob("results.[pc]*"))


def test_without_a_token_the_remedy_is_said() -> None:
    make_run()
    with hub() as server:
        ended = push(server, HF_TOKEN="")
    assert ended.returncode == 2
    assert "no token for the Hugging Face hub; set HF_TOKEN" in ended.stderr
