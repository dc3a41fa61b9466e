"""The page: the template's variables, and how data gets into it without becoming code."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import batchkit
from batchkit.commands.report.charts import bar, charts, shares
from batchkit.commands.report.figures import RunStats, timeline
from batchkit.commands.report.heading import about, facts, notes, picture_notes
from batchkit.commands.report.pictures import Picture
from batchkit.commands.report.rows import Shown, clip
from batchkit.config.numbers import number, when
from batchkit.config.tables import JobConfig
from batchkit.errors import StoreError
from batchkit.runs.comparison import origin
from batchkit.scoring.metrics import ALL, OUT_OF_TEN, Group, ScoreTable, head
from batchkit.storage.files import replacing
from batchkit.storage.generations import totals_by_step
from batchkit.storage.manifest import Manifest
from batchkit.storage.runfolder import JOB
from batchkit.types import utc_now

_MAX_JOB_CHARACTERS = 60_000
_MAX_GROUPS = 200


def render(
    folder: Path,
    manifest: Manifest,
    job: JobConfig,
    stats: RunStats,
    table: ScoreTable,
    shown: Shown,
    pictures: Sequence[Picture],
) -> Iterator[str]:
    """The page in pieces."""
    line = timeline(stats.finished_at, stats.latency_s)
    all_notes = [
        *notes(folder, manifest, stats, table),
        *shown.notes,
        *picture_notes(pictures),
        *_group_notes(table),
    ]
    job_toml = (folder / JOB).read_text(encoding="utf-8", errors="replace")
    return page(
        "report/page.html.j2",
        title=manifest.name,
        subtitle=origin(manifest),
        facts=facts(manifest, stats, line, table),
        notes=all_notes,
        group_by=job.scoring.group_by,
        heads=[head(name) for name in table.names],
        lines=_lines(table),
        spread=_spread(table),
        charts=charts(stats, line),
        failures=shares(stats.failed_by_kind),
        steps=[(name or "(no name)", of) for name, of in totals_by_step(folder).items()],
        about=about(manifest, job),
        job_toml=clip(job_toml, _MAX_JOB_CHARACTERS),
        groups=_groups(table),
        kinds=sorted(stats.failed_by_kind),
        scorers=[(name, head(name)) for name in table.names],
        has_scores=table.overall.scored > 0,
        may_be_unscored=bool(table.names),
        data=as_json(
            {
                "rows": shown.rows,
                "fields": shown.field_names,
                "question": shown.question,
                "scorers": [
                    {"name": name, "head": head(name), "scale": _scale(name)}
                    for name in table.names
                ],
                "total": stats.rows,
            }
        ),
        pictures=as_json([picture.to_json() for picture in pictures]),
    )


def check_page(path: Path) -> None:
    """Raises StoreError if ``path`` is not named like a web page: it might be a log."""
    if path.suffix not in (".html", ".htm"):
        raise StoreError(f"{path}: a report is a web page; name it …{path.stem}.html")


def write_page(path: Path, pieces: Iterable[str]) -> Path:
    """Write a page, which appears under its name only when it is complete.

    Raises:
        StoreError: the file can't be written, or its name is not that of a web page.
    """
    check_page(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as error:
        raise StoreError(f"{path}: can't write: {error.strerror or error}") from error
    return path


def page(template: str, **names: Any) -> Iterator[str]:
    """A template in a folder of ``commands/``, in pieces. Everything is escaped; its script and
    style are allowed by their hashes, and nothing else is allowed."""
    script, style = _resource("elements.js") + _resource("page.js"), _resource("page.css")
    policy = (
        "default-src 'none'; img-src data:;"
        f" script-src '{_hash(script)}'; style-src '{_hash(style)}';"
        " base-uri 'none'; form-action 'none'"
    )
    environment = Environment(
        loader=PackageLoader("batchkit", "commands"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"signed": _signed, "number": number}
    return environment.get_template(template).generate(
        policy=policy,
        script=Markup(script),
        style=Markup(style),
        batchkit=batchkit.__version__,
        made_at=when(utc_now()),
        **names,
    )


def _signed(value: float) -> str:
    """With a real minus sign, as wide as the plus."""
    return f"{value:+.2f}".replace("-", "−")


def as_json(value: Any) -> Markup:
    """JSON that is safe in a ``<script>``: nothing in it ends the element or begins a comment."""
    text = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _resource(name: str) -> str:
    return files("batchkit.commands.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _scale(scorer: str) -> int:
    """What a record's score is multiplied by before it is shown."""
    return 1 if scorer in OUT_OF_TEN else 100


def _groups(table: ScoreTable) -> list[str]:
    """All groups, or the largest if there are very many, in the order of the table."""
    sizes = {name: group.scored + group.unscored for name, group in table.groups.items()}
    largest = set(sorted(sizes, key=lambda name: -sizes[name])[:_MAX_GROUPS])
    return [name for name in table.groups if name in largest]


def _group_notes(table: ScoreTable) -> list[str]:
    left_out = len(table.groups) - len(_groups(table))
    return [f"The table leaves out {left_out:,} small groups."] if left_out else []


def _lines(table: ScoreTable) -> list[dict[str, Any]]:
    lines = [_line(table, name, name, table.groups[name]) for name in _groups(table)]
    return [*lines, _line(table, ALL, None, table.overall)]


def _line(table: ScoreTable, label: str, name: str | None, group: Group) -> dict[str, Any]:
    """A group of the table, for the template; ``name`` is None in the last line, for all rows."""
    cells = []
    for scorer in table.names:
        mean = group.mean(scorer)
        top = 10 if scorer in OUT_OF_TEN else 100
        filled = None if mean is None else bar(mean / top)
        n = len(group.scores.get(scorer, ()))
        cells.append({"scorer": scorer, "mean": mean, "bar": filled, "n": n})
    counts = {"scored": group.scored, "unscored": group.unscored, "failed": group.failed}
    return {"label": label, "group": name, "cells": cells, **counts}


def _spread(table: ScoreTable) -> list[tuple[str, Mapping[str, float]]]:
    """For a reward: mean, std, median, min, max by group."""
    groups = {**table.groups, ALL: table.overall}
    found = {
        name: group.to_json(table.names).get("spread", {}).get(OUT_OF_TEN[0])
        for name, group in groups.items()
    }
    return [(name, spread) for name, spread in found.items() if spread]
