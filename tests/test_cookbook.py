"""Every recipe of docs/cookbook.md runs as it is written, each in a folder of its own.

Instead of a recipe's model, the dry-run engine answers. What has a server talks to one over HTTP.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from tests.support.chat_server import serving
from tests.support.command_line import batchkit

pytestmark = pytest.mark.release

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
EXITS = re.compile(r"#.*\bexits with (\d)")

RECIPES = {
    title: text for title, _, text in (part.partition("\n") for part in PAGE.split("\n## ")[1:])
}


@pytest.mark.parametrize("title", RECIPES)
def test_recipe_runs(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "from mcp" in RECIPES[title]:
        pytest.importorskip("mcp")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "jobs", "jobs")
    for job in Path("jobs").glob("*.toml"):
        write_job(job, job.read_text(encoding="utf-8"))
    with serving() as server:
        for kind, name, text in BLOCK.findall(RECIPES[title]):
            if name.endswith(".toml"):
                write_job(Path(name), text.replace("http://localhost:8000/v1", server.url))
            elif name:
                Path(name).write_text(text, encoding="utf-8")
            elif kind == "python":
                exec(compile(text, f"{title}, in docs/cookbook.md", "exec"), {})
            else:
                assert kind == "bash", f"a {kind} block without a title"
                run_lines(text)


def test_every_recipe_has_a_job_and_commands_for_it() -> None:
    assert len(RECIPES) >= 15
    for title, text in RECIPES.items():
        kinds = {kind for kind, _, _ in BLOCK.findall(text)}
        assert kinds & {"bash", "python"}, title
        assert "toml" in kinds or "jobs/" in text, title


def write_job(path: Path, text: str) -> None:
    """The job with the dry-run engine, unless a server answers it."""
    job = tomlkit.parse(text)
    for table in (job, job.get("scoring", {}).get("judge", {})):
        engine: dict[str, Any] = table.get("engine", {})
        if engine and engine.get("kind") != "openai-server":
            engine["kind"] = "dry-run"
            engine.pop("options", None)
    path.write_text(tomlkit.dumps(job), encoding="utf-8")


def dry(args: list[str]) -> tuple[int, str]:
    ended = batchkit(*without_engine_options(args))
    return ended.exit_code, ended.stdout + ended.stderr


def run_lines(text: str) -> str:
    """Run each command; returns what they print."""
    printed = ""
    for line in text.splitlines():
        program, *args = shlex.split(line, comments=True)
        assert program == "batchkit", line
        wanted = EXITS.search(line)
        exit_code, said = dry(args)
        assert exit_code == int(wanted[1] if wanted else 0), f"{line}\n{said}"
        printed += said
    return printed


def without_engine_options(args: list[str]) -> list[str]:
    """The dry-run engine does not know vLLM's."""
    pairs = zip(["", *args], args, strict=False)
    drop = {n for n, (_, arg) in enumerate(pairs) if arg.startswith("engine.options.")}
    return [arg for n, arg in enumerate(args) if n not in drop and n + 1 not in drop]
