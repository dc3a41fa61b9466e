"""Runs in the working directory whose answers are written down, row by row."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import tomlkit

from tests.support.chat_server import MODEL, ChatServer, Refused, serving
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import LOG
from tests.support.jobs import with_tables
from tests.support.rows import read_jsonl, write_jsonl

Answer = str | list[Any] | dict[str, Any] | Exception


class Script:
    """What a server says to each row, one answer after another; the last one is repeated.

    A row is known by the first word of its prompt; any other is answered as always. An answer is a text, a
    list of the choices, the whole body, or what is raised instead; a choice is a text, or what is not as
    always in OpenAI's object. ``asked`` and ``bodies`` keep each row's requests in order.
    """

    def __init__(self, **answers: list[Answer]) -> None:
        self.answers = answers
        self.asked: dict[str, list[str]] = defaultdict(list)
        self.bodies: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def __call__(self, text: str, body: dict[str, Any]) -> None:
        name = text.split()[0]
        if name not in self.answers:
            return
        self.asked[name].append(text)
        self.bodies[name].append(body)
        answer = self.answers[name][min(len(self.asked[name]), len(self.answers[name])) - 1]
        if isinstance(answer, Exception):
            raise answer
        raise Refused(200, answer if isinstance(answer, dict) else _body(answer, body))

    @property
    def calls(self) -> dict[str, int]:
        return {name: len(prompts) for name, prompts in self.asked.items()}


def _body(answer: str | list[Any], body: dict[str, Any]) -> dict[str, Any]:
    said = answer if isinstance(answer, list) else [answer] * body.get("n", 1)
    choices = [
        {
            "index": n,
            "finish_reason": "stop",
            **(_text(one, body) if isinstance(one, str) else one),
        }
        for n, one in enumerate(said)
    ]
    return {"choices": choices, "usage": {"prompt_tokens": 3, "completion_tokens": 4}}


def _text(text: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"message": {"content": text}} if "messages" in body else {"text": text}


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "q": "?", "a": "7", **more}


def write_job(server: ChatServer | None, rows: list[dict[str, Any]], **tables: Any) -> None:
    """A job over ``rows``, whose prompts begin with their ids; a dry run without a server."""
    write_jsonl(Path("rows.jsonl"), rows)
    engine = {"kind": "openai-server", "model": MODEL, "base_url": server.url} if server else None
    job: dict[str, Any] = {
        "name": "a",
        "input": {"path": "rows.jsonl", "id": "id"},
        "engine": engine or {"kind": "dry-run"},
        "prompt": {"user": "{{ id }} {{ q }}"},
    }
    if "steps" in tables:
        del job["prompt"]
    made = {name: value for name, value in with_tables(job, tables).items() if value is not None}
    Path("job.toml").write_text(tomlkit.dumps(made))


def run(server: ChatServer | None, rows: list[dict[str, Any]], **tables: Any) -> Ended:
    write_job(server, rows, **tables)
    return batchkit("run", "job.toml")


def records() -> dict[str, dict[str, Any]]:
    """The newest by id."""
    return {record["id"]: record for record in read_jsonl(LOG)}


def answered(script: Script, **tables: Any) -> dict[str, dict[str, Any]]:
    """The records, by id, of a row for each name in the script."""
    with serving(script) as server:
        ended = run(server, [*map(row, script.answers)], **tables)
    assert ended.exit_code in (0, 3), ended.stderr
    return records()
