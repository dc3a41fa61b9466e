"""What rows, answers and servers say can't act on the terminal that it is printed on."""

from __future__ import annotations

import json
import os
import pty
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest

from batchkit.config.terminal import plain
from tests.support.chat_server import ChatServer, Refused, error, serving
from tests.support.dry_runs import write_job
from tests.support.forks import LightFork
from tests.support.paths import ROOT
from tests.support.rows import write_jsonl

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]
INPUT = {"path": "rows.jsonl", "id": "id"}


# Sets the title, clears the screen, goes back over the line (C0); the same by C1; turns the text round.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\rgone\x08\x7f\x9b31m\x90\u202e\u2066"
ACTS = [byte for byte in map(chr, [*range(9), *range(11, 32), *range(127, 160)]) if byte != "\r"]
ACTS += ["\u202e", "\u2066"]


def on_a_terminal(*args: str) -> str:
    """All that the command prints on a pseudo-terminal; each newline there is a carriage return too."""
    master, terminal = pty.openpty()
    process = LightFork(
        [sys.executable, "-m", "batchkit", *args],
        stdin=DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
    )
    os.close(terminal)
    printed = b""
    with suppress(OSError):  # Linux: nobody has the other end any more
        while block := os.read(master, 65536):
            printed += block
    os.close(master)
    process.wait(60)
    return printed.decode()


def acting(printed: str) -> list[str]:
    """What of ``printed`` the terminal would obey; the progress bar's own returns are no harm."""
    return [character for character in ACTS if character in printed]


def test_plain_text_passes_as_it_is_and_json_keeps_its_meaning() -> None:
    text = 'tab\t, newline\n, "quotes", ünïcödé, 日本語, 👩‍👩‍👧, مرحبا'
    assert plain(text) == text
    for ascii_only in (True, False):
        line = json.dumps({"text": HOSTILE + text}, ensure_ascii=ascii_only)
        assert json.loads(plain(line)) == {"text": HOSTILE + text}
        assert not acting(plain(line))
    assert plain("a\udc80") == "a\\udc80"


@pytest.mark.parametrize(
    "command",
    [
        ("validate", "job.toml"),
        ("run", "job.toml", "--dry-run"),
        ("run", "job.toml"),
        ("score", "job.toml"),
        ("report", "job.toml"),
        ("report", "job.toml", "--json"),
    ],
)
def test_a_row_can_not_act_on_the_terminal(command: tuple[str, ...]) -> None:
    hostile = {"id": f"id{HOSTILE}", "q": f"q{HOSTILE}", "g": f"g{HOSTILE}", f"f{HOSTILE}": 1}
    write_jsonl(Path("rows.jsonl"), [hostile, {**hostile, "id": f"2{HOSTILE}", "bad": HOSTILE}])
    write_job(
        input=INPUT,
        prompt={"user": "{{ q }}{% if bad is defined %}{{ q[bad] }}{% endif %}"},
        scoring={"scorers": ["em"], "reference": "q", "group_by": "g"},
    )
    if command[0] in ("score", "report"):
        on_a_terminal("run", "job.toml")
    printed = on_a_terminal(*command)
    assert acting(printed) == []
    is_run = command == ("run", "job.toml")  # which prints nothing of a row
    assert is_run or "\\u001b]0;owned" in printed


def test_a_server_can_not_act_on_the_terminal() -> None:
    def refuse(text: str, body: dict[str, Any]) -> str | None:
        raise Refused(403, error(HOSTILE))

    with serving(refuse) as server:
        prepare_for(server)
        printed = on_a_terminal("run", "job.toml")
    assert "access refused" in printed
    assert acting(printed) == []
    assert acting(Path("output/a/run.log").read_text()) == []


def test_an_answer_can_not_act_on_the_terminal() -> None:
    with serving(lambda text, body: f"said {HOSTILE}") as server:
        prepare_for(server)
        on_a_terminal("run", "job.toml")
        for flags in ([], ["--json"]):
            printed = on_a_terminal("show", "job.toml", *flags)
            assert "said" in printed
            assert acting(printed) == []


def prepare_for(server: ChatServer) -> None:
    write_jsonl(Path("rows.jsonl"), [{"id": "1", "q": "hello"}])
    write_job(
        input=INPUT, engine={"kind": "openai-server", "model": "tiny", "base_url": server.url}
    )


def test_a_name_that_is_no_text_is_printed_all_the_same() -> None:
    found = on_a_terminal("status", b"no\xffsuch\x1b[2J".decode("utf-8", "surrogateescape"))
    assert "no\\udcffsuch\\u001b[2J: neither a run folder nor a job file" in found
