"""``[input]``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from pathlib import PurePath
from textwrap import shorten
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, PositiveInt, PrivateAttr, field_validator

from batchkit.config.regular_file import is_file
from batchkit.config.seams import FormatName
from batchkit.config.shard import parse_shard
from batchkit.config.tables.base import Free, Identity, Table

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
PDF_SUFFIX = ".pdf"
CLIP_SUFFIXES = (
    *(".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".aiff", ".aif", ".amr", ".wma"),
    *(".mp4", ".mov", ".mkv", ".webm", ".avi", ".mpeg", ".mpg", ".flv"),
)
ShardText = Annotated[str, AfterValidator(lambda text: str(parse_shard(text)))]
_LONGEST_LABEL = 20  # characters


class InputTable(Table):
    """Where the rows come from."""

    path: Free[str | None] = None
    """File, glob, folder of images, clips or PDFs, folder of a run, or fsspec URL (`s3://`, `hf://`);
    relative paths are looked up beside the job file, then in the working directory. May use `{{
    name }}` from `[vars]`. A URL's signature is used and not stored: to resume from the run folder
    alone, give it again with `--set input.path=…`. Passwords belong in the environment."""
    format: Identity[FormatName] = "auto"
    """`auto` goes by the file's name. `files`: each file is a row; `pdf`: each page; `run`: each
    answered row of the run whose folder `path` is."""
    records: Identity[str | None] = None
    """JSON: the key (dotted) of the list of rows. Excel: the sheet's name, by default the first
    one."""
    separator: Identity[Literal[",", ";", "\t", "|"] | None] = None
    """CSV: what stands between cells; by default a tab in `.tsv`, else a comma, or where line 1 has none, a semicolon,
    a tab or `|`."""
    id: Identity[str | None] = None
    """The field that names a row; by default, its index in the input (a file's `path`, a PDF page's
    `image`, a run's `id`). A row that lacks it fails, and is named `no-id:` and its index. Rows
    that need no id are named so too where they are read together with OpenAI batch files."""
    where: Identity[dict[str, Any]] = Field({})
    """Keep only rows whose field equals the value, or is in the list. Numbers, days and true or
    false are also found where they are text."""
    empty: Identity[Literal["keep", "skip", "fail"]] = "keep"
    """Rows in which a column of the prompt's texts is null or blank: `skip` leaves them out as `where` does, `fail`
    makes them failed rows. How many there are among the first 10,000 is said before the run."""
    cross: Identity[dict[str, list[str | bool | int | float]]] = Field({})
    """Each row once for each value: `cross = { adapter = ["a", "b", ""] }` adds a column `adapter`,
    and the row `7` becomes `7/a`, `7/b` and `7/`. Of a value with more than 20 characters, the id has the first words:
    `7/answer-in-one-word`. Several keys: all their combinations. `limit`,
    `shard`, `where` and `run.sample` count rows before that."""
    limit: Free[PositiveInt | None] = None
    """Only the first rows, counted after `where` and `empty`."""
    shard: Identity[ShardText | None] = None
    """Only this share of those rows, `0/4` to `3/4`. It depends only on a hash of the row's id (of
    its index, if there is no `id`). `run --shard` sets it, and the run folder's name with it."""

    _media_root: str = PrivateAttr("")
    _filled: frozenset[str] = PrivateAttr(frozenset())

    def rows_are_files(self, path: str) -> bool:
        """Whether the file or glob ``path`` is one whose rows are files or their pages."""
        if self.format != "auto":
            return self.format in ("files", "clips", "pdf")
        return path.lower().endswith((*IMAGE_SUFFIXES, *CLIP_SUFFIXES, PDF_SUFFIX))

    @property
    def is_run(self) -> bool:
        """Whether the rows are those of another run, whose folder ``path`` is."""
        if self.format != "auto" or self.path is None:
            return self.format == "run"
        return is_file(f"{self.path}/manifest.json")

    @property
    def may_be_batch(self) -> bool:
        """Whether the rows may be lines for OpenAI's batch API; only the first line says so."""
        if self.format == "auto":
            return self.path is not None and ".jsonl" in self.path.lower()
        return self.format == "openai-batch"

    @property
    def filled(self) -> frozenset[str]:
        """The columns of which none is empty in a row that is read."""
        return self._filled

    @property
    def is_filtered(self) -> bool:
        """Whether only reading the rows shows how many there are to run, whatever the limit."""
        return bool(self.where or self.shard or self.filled)

    def with_filled(self, columns: frozenset[str]) -> InputTable:
        table = self.model_copy()
        table._filled = columns
        return table

    def below(self, media_root: str) -> InputTable:
        """This table, for rows that are files: those below ``media_root`` are named from there."""
        table = self.model_copy()
        table._media_root = media_root.rstrip("/")
        return table

    def name_of_file(self, path: str) -> str:
        """How a row names its file at ``path``: as a template of ``prompt.images`` can, below
        ``media.root`` if it is there."""
        if "://" in path:
            return path.removeprefix(f"{self._media_root}/")
        found, root = PurePath(os.path.normpath(path)), self._media_root
        is_below = "://" not in root and root and found.is_relative_to(root)
        return str(found.relative_to(root) if is_below else found)

    @field_validator("where", mode="before")
    @classmethod
    def _is_no_expression(cls, where: Any) -> Any:
        if isinstance(where, str):
            raise ValueError(
                f'found {where!r}, expected a table of fields with the values to keep: {{ label = "positive" }} or'
                " { stars = [4, 5] }"
            )
        return where

    @field_validator("cross", mode="before")
    @classmethod
    def _has_names_for_rows(cls, cross: Any) -> Any:
        for name, values in cross.items() if isinstance(cross, dict) else ():
            if not isinstance(values, list):
                raise ValueError(f"{name}: found {values!r}, expected a list of values")
            texts = [str(value) for value in values]
            if not name or not values:
                raise ValueError(f"{name}: has no values" if name else "a column needs a name")
            if twice := {text for text in texts if texts.count(text) > 1}:
                raise ValueError(f"{name}: {min(twice)!r} is given twice")
        return cross


class Variant(NamedTuple):
    """One combination of values: the columns that it adds to a row, and its part of the row's id."""

    fields: Mapping[str, Any]
    label: str

    @property
    def name(self) -> str:
        """For people."""
        values = {key: "(none)" if value == "" else value for key, value in self.fields.items()}
        return ", ".join(f"{key} = {value}" for key, value in values.items())


def variants(cross: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Return the variants in the order of the rows; one that adds nothing if ``cross`` is empty."""
    labeled = [[*zip(values, _labels(values), strict=True)] for values in cross.values()]
    return [
        Variant(
            {name: value for name, (value, _) in zip(cross, chosen, strict=True)},
            "/".join(label for _, label in chosen),
        )
        for chosen in product(*labeled)
    ]


def _labels(values: Sequence[Any]) -> Iterator[str]:
    """Yield the part of a row's id for each value: a short value itself, else its first words."""
    taken = set[str]()
    for text in map(str, values):
        label = text
        if len(text) > _LONGEST_LABEL or not text.isprintable():
            words = " ".join(re.findall(r"\w+", text.lower()))
            label = shorten(words, _LONGEST_LABEL, placeholder="").replace(" ", "-")
        if label in taken:
            label = next(name for n in count(2) if (name := f"{label}-{n}") not in taken)
        taken.add(label)
        yield label
