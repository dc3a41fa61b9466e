"""The templates of a job: those of its prompt or its pair, and others, for example
``scoring.table``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.regular_file import read_text
from batchkit.config.tables import JobConfig, PromptTable
from batchkit.errors import JobError, MediaError
from batchkit.rendering.templates import RowTemplate
from batchkit.rendering.templates.sandbox import fields_read, names_in_order
from batchkit.rendering.tools import JobTools


class PathTemplate:
    """A template of the job outside its prompt, for example ``scoring.table``."""

    def __init__(self, key: str, source: str, job: JobConfig) -> None:
        self._job = job
        self._template = RowTemplate(key, source, timeout_s=job.run.row_timeout_s)
        self.takes_long = self._template.is_apart
        """True if it is rendered in a separate process."""

    def render(self, fields: Mapping[str, Any]) -> str:
        """Raises RowError as ``RowTemplate`` does, for example if a name is missing."""
        return self._template.text({**self._job.vars, **fields})

    def path(self, fields: Mapping[str, Any]) -> Path | None:
        """The file that it names, if it exists and is under ``media.root``."""
        root = Path(self._job.media.root).resolve()
        path = (root / self.render(fields)).resolve()
        return path if path.is_file() and path.is_relative_to(root) else None


class _Source(NamedTuple):
    """A template, and its name in errors."""

    key: str
    text: str


class FileTemplates:
    """The templates of ``[prompt]`` and ``[pair]`` that name files."""

    def __init__(self, job: JobConfig) -> None:
        self._timeout_s = job.run.row_timeout_s
        self.query_images = self._images("pair.query_images", job.pair.query_images)
        self.document_images = self._images("pair.document_images", job.pair.document_images)
        self.images = [
            *self._images("prompt.images", job.prompt.images),
            *self.query_images,
            *self.document_images,
        ]
        self.texts = {
            name: RowTemplate(f"prompt.texts.{name}", source, timeout_s=self._timeout_s)
            for name, source in job.prompt.texts.items()
        }
        self.all = [*self.texts.values(), *self.images]

    def _images(self, key: str, sources: Iterable[str]) -> list[RowTemplate]:
        return [
            RowTemplate(f"{key}.{n}", source, timeout_s=self._timeout_s, keeps_type=True)
            for n, source in enumerate(sources)
        ]


class PromptTemplates:
    """The templates of ``[prompt]`` with its tools, ``[pair]`` and ``retry.reask_note``.

    Several threads may share it.

    Raises:
        JobError: a template or template file of the job can't be used.
    """

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        prompt = job.prompt
        system, user = self._sources = _sources_in(prompt)
        self.tools = JobTools(job)
        self.job = _with_texts_of_files(job, system, user, self.tools.inline)
        """The job with the texts of its template files, for a worker that starts later."""
        self.system = system and self._template(*system)
        self.user = user and self._template(*user)
        self.query = self._of_pair("query")
        self.documents = self._of_pair("documents", keeps_type=True)
        self.files = FileTemplates(job)
        self.captions = [
            self._template(f"prompt.captions.{n}", source)
            for n, source in enumerate(prompt.captions)
        ]
        note = self._template("retry.reask_note", job.retry.reask_note)
        self._note = note if job.retry.reask else None
        texts = [source.text for source in (system, user) if source is not None]
        texts += [text for text in (job.pair.query, job.pair.documents) if text is not None]
        self.names = _read_by([*texts, *prompt.captions])
        """What the prompt's text is made of: names of the row, of its texts or of ``[vars]``."""
        in_order = [name for text in texts for name in names_in_order(text)]
        fields = self.names - job.vars.keys()
        self.fields_in_order = [name for name in dict.fromkeys(in_order) if name in fields]
        if self.tools.template is not None:  # most chat templates put them before the messages
            self.fields_in_order[:0] = sorted(self.tools.template.names - job.vars.keys())
        texts_of_row = [self.system, self.user, self.query, self.documents, self._note]
        others = [*texts_of_row, self.tools.template, *self.captions]
        self.takes_long = any(
            part is not None and part.is_apart for part in (*self.files.all, *others)
        )
        """True if a row's templates are rendered in a separate process."""

    def check_files(self) -> None:
        """Raises JobError if a template file changed since it was read."""
        for read, now in zip(self._sources, _sources_in(self._job.prompt), strict=True):
            if now is not None and now != read:
                raise JobError(f"{now.key}: changed as the run began; run the same command again")
        self.tools.check_file()

    def with_vars(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What a template is filled in with."""
        return {**self._job.vars, **fields}

    def note(self, fields: Mapping[str, Any]) -> str:
        return "" if self._note is None else self._note.text(self.with_vars(fields)).strip()

    def _of_pair(self, name: str, *, keeps_type: bool = False) -> RowTemplate | None:
        source = getattr(self._job.pair, name)
        return source and self._template(f"pair.{name}", source, keeps_type=keeps_type)

    def _template(self, key: str, text: str, *, keeps_type: bool = False) -> RowTemplate:
        timeout_s = self._job.run.row_timeout_s
        return RowTemplate(key, text, timeout_s=timeout_s, keeps_type=keeps_type)


def sources_of(template: RowTemplate, names: Mapping[str, Any]) -> list[Any]:
    """The images that one of ``prompt.images`` gives; raises MediaError if it gives none."""
    found = template.value(names)
    if found is None or (isinstance(found, str | list) and not found):
        raise MediaError("the row names no image: the template's value is empty")
    return found if isinstance(found, list) else [found]


def names_in(job: JobConfig, prompt: PromptTable | None, templates: Iterable[str]) -> set[str]:
    """The row's fields that ``prompt`` and ``templates`` read."""
    names = _read_by(templates)
    if prompt is not None:
        made = PromptTemplates(job.model_copy(update={"prompt": prompt}))
        images = [*prompt.images, *job.pair.query_images, *job.pair.document_images]
        names |= (made.names | _read_by(images)) - prompt.texts.keys()
        names |= _read_by(prompt.texts.values())  # a path may read the field that its text replaces
        names |= set() if made.tools.template is None else made.tools.template.names
    return names - job.vars.keys()


def _read_by(sources: Iterable[str]) -> set[str]:
    return set[str]().union(*map(fields_read, sources))


def _sources_in(prompt: PromptTable) -> tuple[_Source | None, _Source | None]:
    """Of the system message, and of the user's."""
    return (
        _source("system", prompt.system, prompt.system_file),
        _source("user", prompt.user, prompt.user_file),
    )


def _source(key: str, text: str | None, path: str | None) -> _Source | None:
    if path is None:
        return None if text is None else _Source(f"prompt.{key}", text)
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobError(f"prompt.{key}_file: {path}: can't be read: {reason}") from error
    return _Source(f"prompt.{key}_file: {path}", text)


def _with_texts_of_files(
    job: JobConfig, system: _Source | None, user: _Source | None, tools: Any
) -> JobConfig:
    texts = {
        "system": system and system.text,
        "system_file": None,
        "user": user and user.text,
        "user_file": None,
        "tools": tools,
    }
    return job.model_copy(update={"prompt": job.prompt.model_copy(update=texts)})
