"""The templates of a job's prompt or pair, and files that all rows use, for example a sample image."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from itertools import chain
from typing import Any

from batchkit.config.regular_file import read_text
from batchkit.config.tables import JobConfig, PromptTable
from batchkit.config.values import from_json
from batchkit.errors import JobError, MediaError, RequestError, RowError
from batchkit.rendering.media import load_bytes
from batchkit.rendering.templates import RowTemplate
from batchkit.rendering.templates.sandbox import fields_read, names_in_order
from batchkit.rendering.tools import JobTools
from batchkit.sources.reader import shown
from batchkit.types import CLIPS


class FileTemplates:
    """The templates of ``[prompt]`` and ``[pair]`` that name files."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        self.query_images = self._images("pair.query_images", job.pair.query_images)
        self.document_images = self._images("pair.document_images", job.pair.document_images)
        self.by_kind = {
            kind: self._images(f"prompt.{kind}s", getattr(job.prompt, f"{kind}s"))
            for kind in ("image", *CLIPS)
        }
        """The templates of images and of each kind of clip."""
        self.by_kind["image"] += [*self.query_images, *self.document_images]
        self.texts = {
            name: RowTemplate(job, f"prompt.texts.{name}", source)
            for name, source in job.prompt.texts.items()
        }
        self.media = [*chain.from_iterable(self.by_kind.values())]
        self.all = [*self.texts.values(), *self.media]

    def _images(self, key: str, sources: Iterable[str]) -> list[RowTemplate]:
        return [
            RowTemplate(self._job, f"{key}.{n}", source, keeps_type=True)
            for n, source in enumerate(sources)
        ]


class PromptTemplates:
    """The templates of ``[prompt]`` (with its tools), ``[pair]``, ``[sampling]`` and ``retry.reask_note``.

    Several threads may share it.

    Raises:
        JobError: a template or template file of the job is invalid.
    """

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        prompt = job.prompt
        self.tools = JobTools(job)
        self.system = self._of_prompt("system", prompt.system, prompt.system_file)
        self.user = self._of_prompt("user", prompt.user, prompt.user_file, prompt.marks)
        texts_of_files = {
            "system": self.system and self.system.source,
            "system_file": None,
            "user": self.user and self.user.source,
            "user_file": None,
            "tools": self.tools.inline,
        }
        self.job = job.with_keys(prompt=texts_of_files)
        self.query = self._of_pair("query")
        self.documents = self._of_pair("documents", keeps_type=True)
        self.files = FileTemplates(job)
        lora = prompt.lora
        self.lora = RowTemplate(job, "prompt.lora", lora, keeps_type=True) if lora else None
        self.sampling = {
            name: RowTemplate(job, f"sampling.{name}", source, keeps_type=True)
            for name, source in job.sampling.templates.items()
        }
        note = RowTemplate(job, "retry.reask_note", job.retry.reask_note)
        self._note = note if job.retry.reask else None
        texts = [*filter(None, (self.system, self.user, self.query, self.documents))]
        tools = [*filter(None, [self.tools.template])]
        self.names = _names_of(texts)
        """The names in the prompt's text: fields of the row, names in ``prompt.texts``, or entries of ``[vars]``."""
        in_order = [name for text in texts for name in names_in_order(text.source)]
        fields = self.names - job.vars.keys()
        # Tools first, because most chat templates put them before the messages.
        self.fields_in_order = sorted(_names_of(tools) - job.vars.keys())
        self.fields_in_order += [name for name in dict.fromkeys(in_order) if name in fields]
        self.all = [*texts, *tools, *self.files.all]
        """The templates of the prompt."""
        others = filter(None, [self._note, self.lora, *self.sampling.values()])
        self.takes_long = any(part.is_apart for part in (*self.all, *others))
        """True if a row's templates are rendered in a separate process."""

    def note(self, fields: Mapping[str, Any]) -> str:
        return "" if self._note is None else self._note.text(fields).strip()

    def _of_prompt(
        self, key: str, text: str | None, path: str | None, marks: Set[str] = frozenset()
    ) -> RowTemplate | None:
        if path is None:
            if text is None:
                return None
            return RowTemplate(self._job, f"prompt.{key}", text, marks=marks)
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise JobError(f"prompt.{key}_file: {path}: can't be read: {reason}") from error
        return RowTemplate(self._job, f"prompt.{key}_file: {path}", text, marks=marks)

    def _of_pair(self, name: str, *, keeps_type: bool = False) -> RowTemplate | None:
        source = getattr(self._job.pair, name)
        return source and RowTemplate(self._job, f"pair.{name}", source, keeps_type=keeps_type)


def sources_of(template: RowTemplate, names: Mapping[str, Any]) -> list[Any]:
    """Return the sources that a template of ``prompt.images``, ``videos`` or ``audios`` names.

    Raises:
        MediaError: the template's value is empty.
    """
    found = template.value(names)
    if found is None or (isinstance(found, str | list) and not found):
        kind = template.key.split(".")[1].removesuffix("s").rpartition("_")[2]
        raise MediaError(
            f"the row names no {kind}: the template's value is empty; fill the row's field, or correct the template"
        )
    return found if isinstance(found, list) else [found]


def number_of(template: RowTemplate, names: Mapping[str, Any]) -> Any:
    """Return the number in a template's value, which may be a number or a text such as "0.5". Raises RequestError for
    any other value."""
    found = template.value(names)
    if not isinstance(number := from_json(found), int | float):
        raise RequestError(
            f"{template.key}: found {shown(found)}, expected a number; correct the row's column or the template"
        )
    return number


def constant_files(job: JobConfig) -> dict[str, str]:
    """Return a hash of each prompt file that is the same for all rows, because its template uses no field of the row.

    The hashes become part of the run's identity, so that a changed sample image is noticed. A hash is stored under the
    template's key, followed by the file's number if the template names several files. Web addresses and unreadable
    files are left out; each row reports an unreadable file later.

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
        sources = sources_of(template, {})
        for n, source in enumerate(sources):
            with suppress(RowError):
                content = load_bytes(source, job.media) + b"\n"
                hashed = hashlib.sha256(content).hexdigest()[:16]
                yield key if len(sources) == 1 else f"{key}.{n}", hashed


def names_in(job: JobConfig, prompt: PromptTable | None, templates: Iterable[str]) -> set[str]:
    """Return the row's fields that ``prompt`` and ``templates`` use."""
    names = set[str]().union(*map(fields_read, templates))
    if prompt is not None:
        made = PromptTemplates(job.with_keys(prompt=prompt))
        # A template for a text's path may use a field with the name of the text, so these templates are separate.
        texts = _names_of(made.files.texts.values())
        shown = (part for part in made.all if part not in made.files.texts.values())
        names |= (_names_of(shown) - prompt.texts.keys()) | texts
    return names - job.vars.keys()


def _names_of(templates: Iterable[RowTemplate]) -> set[str]:
    return set[str]().union(*(template.names for template in templates))
