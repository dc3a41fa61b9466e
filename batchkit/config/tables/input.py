"""``[input]``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from batchkit.config.shard import parse_shard
from batchkit.config.tables.base import Free, Identity, Table

Format = Literal["auto", "jsonl", "json", "csv", "parquet", "xlsx", "openai-batch", "prompts"]


class InputTable(Table):
    """Where the rows come from."""

    path: Free[str | None] = Field(
        None,
        description="File, glob, or fsspec URL (`s3://`, `hf://`); relative paths are looked up"
        " beside the job file, then in the working directory. May use `{{ name }}` from `[vars]`. A"
        " URL's signature or password is used and not stored: to resume from the run folder"
        " alone, give it again with `--set input.path=…`.",
    )
    format: Identity[Format] = Field("auto", description="`auto` goes by the file's name.")
    records: Identity[str | None] = Field(
        None,
        description="JSON: the key (dotted) of the list of rows. Excel: the sheet's name, by default the"
        " first one.",
    )
    id: Identity[str | None] = Field(
        None,
        description="The field that names a row; by default, its index in the input. A row that lacks it"
        " fails, and is named `no-id:` and its index. Rows that need no id are named so too where they"
        " are read together with OpenAI batch files.",
    )
    where: Identity[dict[str, Any]] = Field(
        {}, description="Keep only rows whose field equals the value, or is in the list."
    )
    limit: Free[PositiveInt | None] = Field(
        None, description="Only the first rows, counted after `where`."
    )
    shard: Identity[str | None] = Field(
        None,
        description="Only this share of those rows, `0/4` to `3/4`. It depends only on a hash of the row's"
        " id (of its index, if there is no `id`). `run --shard` sets it, and the run folder's name"
        " with it.",
    )

    @field_validator("shard")
    @classmethod
    def _names_a_shard(cls, text: str | None) -> str | None:
        return None if text is None else str(parse_shard(text))
