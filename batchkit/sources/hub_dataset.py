"""A dataset on the Hugging Face hub as input: ``hf://datasets/OWNER/NAME`` means all its Parquet files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from batchkit.errors import InputError

_DATASET = re.compile(r"hf://datasets/[^/@]+/[^/@]+(@(refs/(convert|pr)/\w+|[^/]+))?/?")
_NUMBER = re.compile(r"\d{4,}(-of-\d+)?(-[0-9a-f]{16})?(?=\.parquet$)")  # of one file of a split


def is_whole_dataset(path: str) -> bool:
    """Return True if ``path`` names a dataset on the hub, or a revision of it, and no file or folder in it."""
    return _DATASET.fullmatch(path) is not None


def one_split(path: str, files: Sequence[str]) -> list[str]:
    """Return ``files``, the Parquet files of the dataset ``path``, if all belong to one split.

    Files of one split have the same path apart from a number: ``data/train-00000-of-00002.parquet``.

    Raises:
        InputError: The dataset has no Parquet files, or several splits. The message lists a pattern for each split.
    """
    if not files:
        name = path.rstrip("/")
        raise InputError(
            f"{path}: no Parquet files found; check the name and, for a private dataset, HF_TOKEN. If it has other files,"
            f" name them, as in {name}/*.jsonl, or read the Parquet files that the hub made of them:"
            f" {name.partition('@')[0]}@refs/convert/parquet"
        )
    splits = list(dict.fromkeys(_NUMBER.sub("*", file) for file in files))
    if len(splits) > 1:
        shown = ", ".join(splits[:20]) + f" and {len(splits) - 20} more" * (len(splits) > 20)
        raise InputError(f"{path}: has several splits; set input.path to one of {shown}")
    return [*files]
