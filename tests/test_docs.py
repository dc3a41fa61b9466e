"""The docs say what the code says: the page made from it, the commands, the job files, the links."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import click
import make_api_doc as api
import make_job_file_doc as script
import pytest

from batchkit.cli import cli
from batchkit.config.job_schema import SCHEMA, descriptions, job_schema
from batchkit.config.loading import parse_job
from batchkit.config.tables import JobConfig

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "job-file.md"
API = ROOT / "docs" / "api.txt"


def test_job_file_page_is_what_the_script_makes_of_the_models() -> None:
    assert PAGE.read_text(encoding="utf-8") == script.document(), (
        f"run {sys.executable} scripts/make_job_file_doc.py and commit docs/job-file.md"
    )


def test_api_txt_is_what_the_script_makes_of_the_code() -> None:
    assert API.read_text(encoding="utf-8") == api.document(), (
        f"the public interface changed: run {sys.executable} scripts/make_api_doc.py, and read docs/releases.md"
    )


def test_schema_of_the_package_is_what_the_script_makes_of_the_models() -> None:
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == job_schema(), (
        f"run {sys.executable} scripts/make_job_file_doc.py and commit {SCHEMA.name}"
    )


MEASURED = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.json"))


@pytest.mark.parametrize("name", MEASURED)
def test_tables_of_comparisons_are_made_of_the_same_measurements(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))
    found = json.loads(script["FOUND"].read_text("utf-8"))
    for page, table in script["tables"](found).items():
        text = page.read_text("utf-8")
        again = script["with_table"](text, table, f"{name}.py")
        assert again == text, f"run benchmarks/{name}.py --tables"


def test_every_key_is_described_on_the_page() -> None:
    page = script.document()
    for name, field in JobConfig.model_fields.items():
        keys = getattr(field.annotation, "model_fields", {})
        described = descriptions(field.annotation) if keys else {}
        title = {"steps": "[[steps]]", "engines": "[engines.NAME]"}.get(name, f"[{name}]")
        assert f"\n## `{title}`\n" in page or f"| `{name}` |" in page
        for key in keys:
            assert described.get(key), f"{name}.{key} has no description"
            assert f"| `{key}` |" in page


HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *HOW_TO,
]


def blocks(kind: str) -> list[tuple[str, str]]:
    """The page and the text of every fenced block of ``kind``."""
    return [
        (page.name, text)
        for page in PAGES
        for text in re.findall(
            rf"^```{kind}[^\n]*\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
        )
    ]


def commands() -> list[tuple[str, str]]:
    """The page and the text of every batchkit command that is shown or mentioned with options."""
    shown = [
        (page, line)
        for page, text in blocks("(?:bash)?")
        for line in re.sub(r"\\\n *", "", text).splitlines()
    ]
    mentioned = [
        (page.name, text)
        for page in PAGES
        for text in re.findall(r"`(batchkit [^`…]+)`", " ".join(page.read_text("utf-8").split()))
    ]
    return [(page, text) for page, text in shown + mentioned if text.startswith("batchkit ")]


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_in_the_docs_can_be_typed(page: str, command: str) -> None:
    job = re.sub(r"\$S\b", "job.toml", command.split(" | ")[0])
    _, *args = shlex.split(re.sub(r"\$[A-Z]\b", "", job), comments=True)
    if args in (["--help"], ["--version"]):
        return
    context = click.Context(cli, **cli.context_settings)
    name, found, rest = cli.resolve_command(context, args)
    assert found is not None
    if rest:
        found.make_context(name, rest, parent=context)


@pytest.mark.parametrize(
    ("page", "text"), [block for block in blocks("toml") if block[0] != "plugins.md"]
)  # which test_plugins.py runs
def test_job_files_in_the_docs_are_jobs(page: str, text: str) -> None:
    table = tomllib.loads(text)
    table.pop("variant", None)
    parse_job({"engine": {"kind": "dry-run"}} | table, page)


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_programs_in_the_docs_are_python(page: str, text: str) -> None:
    compile(text, page, "exec")


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_a_how_to_page_fits_on_a_screen_and_has_a_test_that_runs_it(page: Path) -> None:
    assert len(page.read_text("utf-8").splitlines()) <= 60
    assert (ROOT / "tests" / "how_to" / f"test_{page.stem.replace('-', '_')}.py").exists()


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_messages_in_troubleshooting_are_printed_by_batchkit() -> None:
    printed = "\n".join(
        text for path in (ROOT / "batchkit").rglob("*.py") for text in texts_in(path)
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (`.*)", page, re.MULTILINE)
    messages = [m for heading in headings for m in re.findall(r"`(.*?…?)`(?:,|$| )", heading)]
    messages += re.findall(r"^\| `([^`|]*…[^`|]*)`", page, re.MULTILINE)
    assert len(messages) > 80
    for message in messages:
        for part in map(str.strip, re.split(r"[…:;,'\"]", message)):
            if len(part) > 6 and part != "batchkit status":
                assert part in printed, f"docs/troubleshooting.md: {part!r}: no such message"


def test_no_text_installs_the_other_project_that_is_named_batchkit() -> None:
    """The distribution is batchkit-vllm; ``how_to_install`` gives the command for a message."""
    places = [*PAGES, *(ROOT / "batchkit").rglob("*.py")]
    wrong = re.compile(r"""(?:pip install|uv add)[^`\n]*\bbatchkit(?:\[|['"`\s]|$)""", re.MULTILINE)
    assert not [place.name for place in places if wrong.search(place.read_text(encoding="utf-8"))]


def texts_in(path: Path) -> list[str]:
    """The literal texts in a module; what an f-string fills in is ``…``."""
    return [
        "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
        if isinstance(node, ast.JoinedStr)
        else str(node.value)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_paths_in_the_pages_for_contributors_exist(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    folders = [ROOT, *(ROOT / "batchkit" / sub for sub in ("", "commands", "execution"))]
    paths = re.findall(r"`((?:\w+/)+(?:\w+\.(?:py|md))?|\w+\.py)`", page)
    assert len(paths) > 25
    missing = [
        path
        for path in paths
        if "NAME" not in path and not any((folder / path).exists() for folder in folders)
    ]
    assert not missing, f"{name} names {missing}"


def test_paths_of_tests_and_benchmarks_in_the_docs_exist() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "benchmarks").glob("*.md")]:
        for path in re.findall(
            r"`((?:tests|benchmarks|scripts)/[\w/.]*)`", page.read_text("utf-8")
        ):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
