"""The files that the prompt of every row includes, for example a picture of a good answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress

from batchkit.config.tables import JobConfig
from batchkit.errors import RowError
from batchkit.rendering.media import load_bytes
from batchkit.rendering.templates import RowTemplate
from batchkit.rendering.templates.prompt import sources_of
from batchkit.rendering.templates.sandbox import fields_read


def constant_files(job: JobConfig) -> dict[str, str]:
    """A hash of each file of a template of a text or an image that reads no field of the row, by the
    template's key, and the file's number if there are several.

    Web addresses are left out, and files that can't be read: they fail each row.

    Raises:
        JobError: a template is not valid.
    """
    found = {}
    for template in _constant_templates(job):
        with suppress(RowError):
            sources = sources_of(template, job.vars)
            for n, source in enumerate(sources):
                key = template.key if len(sources) == 1 else f"{template.key}.{n}"
                with suppress(RowError):
                    content = load_bytes(source, job.media) + b"\n"
                    found[key] = hashlib.sha256(content).hexdigest()[:16]
    return found


def _constant_templates(job: JobConfig) -> Iterator[RowTemplate]:
    timeout_s = job.run.row_timeout_s
    for place, its in job.of_each_step():
        texts = {f"prompt.texts.{name}": text for name, text in its.prompt.texts.items()}
        images = {
            f"{key}.{n}": text
            for key, images in (
                ("prompt.images", its.prompt.images),
                ("pair.query_images", its.pair.query_images),
                ("pair.document_images", its.pair.document_images),
            )
            for n, text in enumerate(images)
        }
        for key, text in {**texts, **images}.items():
            keeps_type = key in images
            made = RowTemplate(place + key, text, timeout_s=timeout_s, keeps_type=keeps_type)
            if fields_read(text) <= job.vars.keys():
                yield made
