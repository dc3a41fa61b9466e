"""What rows, answers and servers say can't act on the terminal that it is printed on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.terminal import plain
from tests.support import terminals
from tests.support.chat_server import ChatServer, Refused, error, serving
from tests.support.dry_runs import write_job
from tests.support.rows import write_jsonl

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]
INPUT = {"path": "rows.jsonl", "id": "id"}


# Sets the title, clears the screen, goes back over the line (C0); the same by C1; turns the text round.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\rgone\x08\x7f\x9b31m\x90\u202e\u2066"
ACTS = [byte for byte in map(chr, [*range(9), *range(11, 32), *range(127, 160)]) if byte != "\r"]
ACTS += ["\u202e", "\u2066"]


on_a_terminal = partial(terminals.on_a_terminal, TERM="dumb")


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


def test_a_row_can_not_act_on_the_terminal() -> None:
    hostile = {"id": f"id{HOSTILE}", "q": f"q{HOSTILE}", "g": f"g{HOSTILE}", f"f{HOSTILE}": 1}
    write_jsonl(Path("rows.jsonl"), [hostile, {**hostile, "id": f"2{HOSTILE}", "bad": HOSTILE}])
    write_job(
        input=INPUT,
        prompt={"user": "{{ q }}{% if bad is defined %}{{ q[bad] }}{% endif %}"},
        scoring={"scorers": ["em"], "reference": "q", "group_by": "g"},
    )
    commands = ["validate", "run", "score", "report"]
    for command in (*([name] for name in commands), ["run", "--dry-run"], ["report", "--json"]):
        printed = on_a_terminal(command[0], "job.toml", *command[1:])
        assert acting(printed) == []
        # A run prints nothing of a row.
        assert command == ["run"] or "\\u001b]0;owned" in printed, command


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
