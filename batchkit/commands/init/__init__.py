"""The ``init`` command: writes a commented job file to start from.

The templates are in this folder, named by kind. The first line of each describes its purpose.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.job_schema import SCHEMA, job_schema
from batchkit.config.suggest import did_you_mean
from batchkit.errors import JobError

KINDS = (
    *("text", "images", "pdf", "json"),
    *("embed", "classify", "rerank"),
    *("openai", "judge", "steps"),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Written(NamedTuple):
    """A job file that ``init`` has written, and its kind."""

    path: Path
    kind: str

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "kind": self.kind}

    def to_text(self) -> str:
        return (
            f"{self.path}: set the input, the prompt and the model in it, then\n"
            f"  batchkit validate {self.path}\n"
            f"  batchkit run {self.path}"
        )


class Kinds(NamedTuple):
    """The kinds of job files that ``init`` can write. ``purposes``: one line of text for each kind."""

    purposes: dict[str, str]

    def to_json(self) -> dict[str, str]:
        return self.purposes

    def to_text(self) -> str:
        lines = [f"  {kind:<8} {purpose}" for kind, purpose in self.purposes.items()]
        return "\n".join(["`batchkit init KIND` writes KIND.toml:", *lines])


class Schema:
    """The JSON Schema of job files, with the plug-ins that are installed here."""

    def to_json(self) -> dict[str, Any]:
        return job_schema()

    def to_text(self) -> str:
        return json.dumps(job_schema(), indent=1, ensure_ascii=False)


def kinds() -> Kinds:
    return Kinds({kind: _text(kind).partition("\n")[0].removeprefix("# ") for kind in KINDS})


def init(kind: str, path: Path | None = None) -> Written:
    """Write a job file of ``kind`` to ``path`` (default ``<kind>.toml``). The job is named after the file. The first
    line refers editors to the schema in this package.

    Raises:
        JobError: The kind is unknown, the file exists, or it can't be written.
    """
    if kind not in KINDS:
        raise JobError(
            f"init {kind}: known kinds are {', '.join(KINDS)}{did_you_mean(kind, KINDS)}"
        )
    path = path or Path(f"{kind}.toml")
    text = _text(kind).replace(f"{kind}.toml", str(path))
    if _NAME.fullmatch(path.stem):
        text = text.replace(f'name = "{kind}" ', f'name = "{path.stem}" ')
        text = text.replace(f"output/{kind}\n", f"output/{path.stem}\n")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"#:schema {SCHEMA.as_uri()}\n{text}")
    except FileExistsError:
        raise JobError(
            f"{path}: exists already; give another file: batchkit init {kind} FILE"
        ) from None
    except OSError as error:
        raise JobError(f"{path}: can't be written: {error.strerror}") from error
    return Written(path, kind)


def _text(kind: str) -> str:
    return Path(__file__).with_name(f"{kind}.toml").read_text(encoding="utf-8")
