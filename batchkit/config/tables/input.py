"""The table ``[input]``."""

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
    """Where the rows come from, and which of them to run."""

    path: Free[str | None] = None
    """File, glob pattern, folder of images, clips or PDFs, run folder, or fsspec URL (`s3://`, `hf://`). A relative
    path is looked up beside the job file, then in the working directory. It may contain `{{ name }}` from `[vars]`. A
    signature in a URL's query is used but not stored: to resume from the run folder alone, pass the complete URL again
    with `--set input.path=…`. Put passwords into the environment."""
    format: Identity[FormatName] = "auto"
    """Format of the input. `auto` detects it from the file name. `files`: one row per file. `pdf`: one row per page.
    `run`: one row per answered row of another run, whose folder is `path`."""
    records: Identity[str | None] = None
    """JSON: dotted key of the list of rows. Excel: name of the sheet (the first sheet by default)."""
    separator: Identity[Literal[",", ";", "\t", "|"] | None] = None
    """CSV: the character between cells. The default for `.tsv` is a tab. For other files, it is the first of comma,
    semicolon, tab and `|` that line 1 contains."""
    id: Identity[str | None] = None
    """Field that identifies a row. The default is the row's index in the input (for files `path`, for PDF pages
    `image`, for runs `id`). A row without the field fails and gets the id `no-id:INDEX`. If the input also has OpenAI
    batch files, whose rows have ids, rows of its other files get the id `no-id:INDEX` instead of their index, and do
    not fail."""
    where: Identity[dict[str, Any]] = Field({})
    """Keep only rows whose field equals the value or is in the list. Numbers, dates and booleans also match their
    text form."""
    empty: Identity[Literal["keep", "skip", "fail"]] = "keep"
    """Handling of rows in which a column of the prompt is null or blank. `keep` runs them, `skip` leaves them out
    like `where`, `fail` makes them failed rows. `run` prints how many of the first 10,000 rows are affected."""
    cross: Identity[dict[str, list[str | bool | int | float]]] = Field({})
    """Run each row once per value. `cross = { adapter = ["a", "b", ""] }` adds a column `adapter`; row `7` becomes
    `7/a`, `7/b` and `7/`. For a value longer than 20 characters, the id contains its first words:
    `7/answer-in-one-word`. Several keys give all combinations. `limit`, `shard`, `where` and `run.sample` apply
    before rows are multiplied."""
    limit: Free[PositiveInt | None] = None
    """Maximum number of rows, counted after `where` and `empty`. By default all rows run."""
    shard: Identity[ShardText | None] = None
    """Run only this share of the rows: `0/4` to `3/4` for four shards. A hash of the row's id (its index, without
    `id`) decides the shard. `run --shard` sets this key and the name of the run folder."""

    _media_root: str = PrivateAttr("")
    _filled: frozenset[str] = PrivateAttr(frozenset())

    def rows_are_files(self, path: str) -> bool:
        """Return True if each row of ``path`` (a file or glob pattern) is an image, a clip or a PDF page, not a record
        in a file."""
        if self.format != "auto":
            return self.format in ("files", "clips", "pdf")
        return path.lower().endswith((*IMAGE_SUFFIXES, *CLIP_SUFFIXES, PDF_SUFFIX))

    @property
    def is_run(self) -> bool:
        """True if the rows come from another run, whose folder is ``path``."""
        if self.format != "auto" or self.path is None:
            return self.format == "run"
        return is_file(f"{self.path}/manifest.json")

    @property
    def may_be_batch(self) -> bool:
        """True if the rows may be lines for OpenAI's Batch API, as far as the format and the file name show."""
        if self.format == "auto":
            return self.path is not None and ".jsonl" in self.path.lower()
        return self.format == "openai-batch"

    @property
    def filled(self) -> frozenset[str]:
        """The columns that ``empty = "skip"`` checks: rows in which one of them is empty are left out."""
        return self._filled

    @property
    def is_filtered(self) -> bool:
        """True if rows may be left out because of their content or id. The number of rows to run is then unknown until
        all rows are read."""
        return bool(self.where or self.shard or self.filled)

    def with_filled(self, columns: frozenset[str]) -> InputTable:
        table = self.model_copy()
        table._filled = columns
        return table

    def below(self, media_root: str) -> InputTable:
        """Return a copy that stores ``media_root``, so that ``name_of_file`` can return paths relative to this
        folder."""
        table = self.model_copy()
        table._media_root = media_root.rstrip("/")
        return table

    def name_of_file(self, path: str) -> str:
        """Return the value of a row's ``path`` or ``image`` field for the file at ``path``. For a file below
        ``media.root``, the value is a path relative to ``media.root``, as templates of ``prompt.images`` need it."""
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
                f'found {where!r}, expected a table of fields and the values to keep: {{ label = "positive" }} or'
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
                raise ValueError(
                    f"{name}: the list of values is empty" if name else "a column needs a name"
                )
            if twice := {text for text in texts if texts.count(text) > 1}:
                raise ValueError(f"{name}: {min(twice)!r} is listed twice; remove one")
        return cross


class Variant(NamedTuple):
    """One combination of ``input.cross`` values. ``fields``: the columns that it adds to a row, with their values;
    ``label``: the text that it adds to the row's id."""

    fields: Mapping[str, Any]
    label: str

    @property
    def name(self) -> str:
        """The combination as text, for example ``adapter = legal, tone = (none)``."""
        values = {key: "(none)" if value == "" else value for key, value in self.fields.items()}
        return ", ".join(f"{key} = {value}" for key, value in values.items())


def variants(cross: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Return all combinations of the values in ``cross``. Every input row is repeated once per combination, in the
    order of the list. If ``cross`` is empty, return one variant that adds no column."""
    labeled = [[*zip(values, _labels(values), strict=True)] for values in cross.values()]
    return [
        Variant(
            {name: value for name, (value, _) in zip(cross, chosen, strict=True)},
            "/".join(label for _, label in chosen),
        )
        for chosen in product(*labeled)
    ]


def _labels(values: Sequence[Any]) -> Iterator[str]:
    """Yield each value's part of a row id: the value itself if it is short, otherwise its first words. All labels
    differ."""
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
