"""The files that the prompt of every row includes, for example a picture of a good answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress

from batchkit.config.tables import JobConfig
from batchkit.errors import RowError
from batchkit.rendering.media import load_bytes
from batchkit.rendering.templates import RowTemplate
from batchkit.rendering.templates.prompt import FileTemplates, sources_of


def constant_files(job: JobConfig) -> dict[str, str]:
    """A hash of each file of a template of a text or an image that reads no field of the row, by the
    template's key, and the file's number if there are several.

    Web addresses are left out, and files that can't be read: they fail each row.

    Raises:
        JobError: a template is not valid.
    """
    found: dict[str, str] = {}
    for place, its in job.of_each_step():
        for template in FileTemplates(its).all:
            if template.names <= job.vars.keys():
                found.update(_hashes(place + template.key, template, job))
    return found


def _hashes(key: str, template: RowTemplate, job: JobConfig) -> Iterator[tuple[str, str]]:
    with suppress(RowError):
        sources = sources_of(template, job.vars)
        for n, source in enumerate(sources):
            with suppress(RowError):
                content = load_bytes(source, job.media) + b"\n"
                hashed = hashlib.sha256(content).hexdigest()[:16]
                yield key if len(sources) == 1 else f"{key}.{n}", hashed
