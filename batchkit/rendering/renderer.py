"""Makes a request from a row: templates filled in, images loaded, sampling merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import orjson

from batchkit.config.regular_file import read_text
from batchkit.config.tables import JobConfig, PromptTable, RetryTable
from batchkit.errors import (
    JobError,
    MediaError,
    PromptTooLongError,
    RequestError,
    RowError,
    TemplateError,
)
from batchkit.rendering.media import SharedImages, check_root, load_image, load_text
from batchkit.rendering.openai_body import messages_of, sampling_of
from batchkit.rendering.templates import RowTemplate
from batchkit.rendering.templates.sandbox import fields_read, names_in_order
from batchkit.rendering.truncation import Place, cut_at, longest_text, next_cut
from batchkit.sources.rowhash import input_hash
from batchkit.types import Completion, Request, Row, RowHint

Message = Mapping[str, Any]

_IMAGE_PARTS = ("image_url", "image", "image_pil")
BYTES_PER_PIXEL = 4  # what Pillow uses for RGB
_BEGINNING = 4096  # characters by which prompts are compared


class _Source(NamedTuple):
    """A template, and its name in errors."""

    key: str
    text: str


class PathTemplate:
    """A template of the job outside its prompt, for example ``scoring.table``."""

    def __init__(self, key: str, source: str, job: JobConfig) -> None:
        self._job = job
        self._template = RowTemplate(key, source, timeout_s=job.run.row_timeout_s)

    def render(self, fields: Mapping[str, Any]) -> str:
        """Raises RowError as ``RowTemplate`` does, for example if a name is missing."""
        return self._template.text({**self._job.vars, **fields})

    def path(self, fields: Mapping[str, Any]) -> Path | None:
        """The file that it names, if it exists and is under ``media.root``."""
        root = Path(self._job.media.root).resolve()
        path = (root / self.render(fields)).resolve()
        return path if path.is_file() and path.is_relative_to(root) else None


def names_in(job: JobConfig, prompt: PromptTable | None, templates: Iterable[str]) -> set[str]:
    """The row's fields that ``prompt`` and ``templates`` read."""

    def read_by(sources: Iterable[str]) -> set[str]:
        return set[str]().union(*map(fields_read, sources))

    names = read_by(templates)
    if prompt is not None:
        renderer = PromptRenderer(job.model_copy(update={"prompt": prompt}))
        names |= (
            read_by([*renderer.sources, *prompt.images, *prompt.captions]) - prompt.texts.keys()
        )
        names |= read_by(prompt.texts.values())  # a path may read the field that its text replaces
    return names - job.vars.keys()


class PromptRenderer:
    """Renders rows for one job. Several threads may share it.

    Raises:
        JobError: a template or template file of the job can't be used, or its ``media.root`` is a
            URL that can't be opened.
    """

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        prompt = job.prompt
        if prompt.images or prompt.texts:
            check_root(job.media)
        system = self._source("system", prompt.system, prompt.system_file)
        user = self._source("user", prompt.user, prompt.user_file)
        self.sources = [source.text for source in (system, user) if source is not None]
        self._system, self._user = self._compile(system), self._compile(user)
        self.job = _with_texts_of_files(job, system, user)
        """The job with the texts of its template files, for a worker that starts later."""
        self._images = [
            self._template(f"prompt.images.{n}", source, keeps_type=True)
            for n, source in enumerate(prompt.images)
        ]
        self._captions = [
            self._template(f"prompt.captions.{n}", source)
            for n, source in enumerate(prompt.captions)
        ]
        self._texts = {
            name: self._template(f"prompt.texts.{name}", source)
            for name, source in prompt.texts.items()
        }
        note = self._template("retry.reask_note", job.retry.reask_note)
        self._note = note if job.retry.reask else None
        self._sampling = job.sampling.params()
        self._shared = SharedImages()
        captions = [_Source("", source) for source in prompt.captions]
        self._names = self._names_in([system, user, *captions])
        self._names_in_order = [*self._order_of_names([system, user])]
        parts = [self._system, self._user, self._note, *self._captions, *self._images]
        self.takes_long = any(
            part is not None and part.is_apart for part in (*parts, *self._texts.values())
        )
        """True if a row's templates are rendered in a separate process."""

    def check_files(self) -> None:
        """Raises JobError if a template file changed since it was read."""
        prompt, now = self._job.prompt, self.job.prompt
        for key, path, text in (
            ("system", prompt.system_file, now.system),
            ("user", prompt.user_file, now.user),
        ):
            source = self._source(key, text, path)
            if source is not None and source.text != text:
                raise JobError(
                    f"{source.key}: changed as the run began; run the same command again"
                )

    def render(self, row: Row, attempt: int = 1) -> Request:
        """The request for ``row``, its images decoded.

        Raises:
            RowError: the row's own fault; otherwise only errors of the machine are raised.
        """
        return self._render(row, attempt, input_hash(row.fields))

    def _render(self, row: Row, attempt: int, of_input: str) -> Request:
        """As ``render``; ``of_input`` is the row's hash before any template was applied."""
        if row.error is not None:
            raise row.error
        self._note_for(row)  # a name that it lacks fails now, and not after the first answer
        return self._request(row, self._with_texts(row.fields), attempt, of_input)

    def _request(self, row: Row, fields: Mapping[str, Any], attempt: int, of_input: str) -> Request:
        """As ``_render``; ``fields`` are the row's own, and the texts of its files."""
        messages, prompt = self._content(fields, {**self._job.vars, **fields})
        request = Request(
            row=row,
            messages=messages,
            prompt=prompt,
            sampling=with_temperature(self._row_sampling(fields), attempt, self._job.retry),
            input_hash=of_input,
            attempt=attempt,
        )
        if not request.images:
            return request
        pixels = sum(image.width * image.height for image in request.images)
        return replace(request, media_bytes=BYTES_PER_PIXEL * pixels)

    def render_or_fail(self, row: Row, attempt: int = 1) -> Request | Completion:
        """As ``render``; a row error is returned as a failed Completion."""
        of_input = input_hash(row.fields)
        try:
            return self._render(row, attempt, of_input)
        except RowError as error:
            request = Request(row, None, None, {}, of_input, attempt)
            return Completion(request, error=error)

    def shortened(self, request: Request, error: PromptTooLongError) -> Request | None:
        """``request`` with its row's longest text cut in the middle, if ``on_too_long`` says so.

        If ``error`` is raised again for that request, this makes one with a larger cut. None if no
        cut helps.
        """
        if self._job.retry.on_too_long != "truncate-middle":
            return None
        row = request.row
        try:
            whole = self._with_texts(row.fields)
            place = self._longest_text(whole)
            max_tokens = request.sampling.get("max_tokens") or 0
            cut = place and next_cut(place.length, request.cut, error, max_tokens)
            if not place or not cut:
                return None
            fields = cut_at(whole, place.path, cut.kept)
            shorter = self._request(row, fields, request.attempt, request.input_hash)
        except RowError:  # the template uses the text in a way that can't be cut
            return None
        return replace(
            shorter,
            row=row,
            sampling=request.sampling,
            media_bytes=request.media_bytes,
            cut=cut,
        )

    def with_note(self, request: Request) -> Request | None:
        """``request`` with the job's note on the format added; None if that note is empty.

        It is added after the plain prompt, or after the user's last message.
        """
        note = self._note_for(request.row)
        if not note:
            return None
        if request.prompt is not None:
            return replace(request, prompt=f"{request.prompt}\n{note}")
        messages = list(request.messages or ())
        of_the_user = [n for n, message in enumerate(messages) if message["role"] == "user"]
        place = of_the_user[-1] if of_the_user else -1
        messages[place] = _with_text(messages[place], f"\n{note}")
        return replace(request, messages=messages)

    def image_sources(self, row: Row) -> list[Any]:
        """The sources of the row's images, in the order of its prompt; nothing is opened.

        Raises:
            RowError: as ``render``.
        """
        own = self._own_prompt(row.fields)
        if own == "messages":
            return _sources_in(row.fields["messages"])
        if own == "body":
            return _sources_in(messages_of(row.fields["body"])[0])
        names = {**self._job.vars, **row.fields}
        return [found for source in self._images for found in _as_list(source.value(names))]

    def hint(self, row: Row) -> RowHint:
        """Opens no file. A row that can't be rendered is like no other row."""
        try:
            max_tokens = self._row_sampling(row.fields).get("max_tokens")
            beginning = self._files(row) or self._beginning(row)
        except Exception:  # the values' own code runs here; rendering will report the error
            return RowHint(str(row.index), 0)
        return RowHint(beginning, max_tokens if isinstance(max_tokens, int) else 0)

    def _files(self, row: Row) -> str:
        """The images and texts that the prompt includes."""
        if self._user is not None and not self._images and not self._texts:
            return ""
        names = {**self._job.vars, **row.fields}
        if any(template.may_take_long for template in (*self._images, *self._texts.values())):
            return ""  # all rows behind this one would wait for it
        files = [*self.image_sources(row), *(text.text(names) for text in self._texts.values())]
        return "\n".join(map(_known_by, files))

    def _beginning(self, row: Row) -> str:
        """The fields that the prompt's templates use, in their order, or the row's own prompt."""
        own = self._own_prompt(row.fields)
        names = self._names_in_order if own is None else [own]
        return "\n".join([str(row.fields.get(name, row.index))[:_BEGINNING] for name in names])

    def _note_for(self, row: Row) -> str:
        if self._note is None:
            return ""
        return self._note.text({**self._job.vars, **row.fields}).strip()

    def _with_texts(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """The row's fields, with each text of ``prompt.texts`` under its name."""
        if not self._texts:
            return fields
        names = {**self._job.vars, **fields}
        texts = {
            name: load_text(path.text(names), self._job.media) for name, path in self._texts.items()
        }
        return {**fields, **texts}

    def _longest_text(self, fields: Mapping[str, Any]) -> Place | None:
        own = self._own_prompt(fields)
        if own is None:
            return longest_text(fields, self._names)
        if own == "body":
            body = fields["body"]
            part = "messages" if "messages" in body else "prompt"
            fields = {**fields, "body": {part: body[part]}}  # without its sampling and its schema
        return longest_text(fields, self._names | {own})

    def _own_prompt(self, fields: Mapping[str, Any]) -> str | None:
        """The name of the field with the row's own prompt; None with ``prompt.user``."""
        if self._user is not None:
            return None
        if self._system is None and not self._images:
            for name in ("messages", "body"):
                if name in fields:
                    return name
        return "prompt"

    def _content(
        self, fields: Mapping[str, Any], names: Mapping[str, Any]
    ) -> tuple[Sequence[Message] | None, str | None]:
        """Messages or plain text: from the job's templates, else from the row itself."""
        own = self._own_prompt(fields)
        if own == "messages":
            return self._load_parts(fields["messages"]), None
        if own == "body":
            messages, prompt = messages_of(fields["body"])
            return (None, prompt) if prompt is not None else (self._load_parts(messages), None)
        if self._user is not None:
            text = self._user.text(names)
        elif "prompt" in fields:
            text = fields["prompt"]
            if not isinstance(text, str):
                raise RequestError(f"prompt: found {_short(text)}, expected text")
        elif self._images:
            text = ""
        else:
            raise TemplateError(
                "nothing to send: prompt.user is not set, and the row has no prompt (or, with"
                f" neither prompt.system nor prompt.images, messages or body); it has {_names(fields)}"
            )
        if not self._job.prompt.chat:
            return None, text
        messages = [{"role": "user", "content": self._user_content(text, names)}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.text(names)})
        return messages, None

    def _user_content(self, text: str, names: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        if not self._images:
            return text
        parts: list[dict[str, Any]] = []
        for number, source in enumerate(self._images):
            if self._captions:
                parts.append({"type": "text", "text": self._captions[number].text(names)})
            parts += [self._image_part(found) for found in _as_list(source.value(names))]
        text_part = [{"type": "text", "text": text}] if text else []
        if self._job.prompt.order == "text-first":
            return text_part + parts
        return parts + text_part

    def _image_part(self, source: Any) -> dict[str, Any]:
        if isinstance(source, str) and len(source) < _BEGINNING:  # a path or a URL
            image = self._shared.get(source, lambda: load_image(source, self._job.media))
        else:
            image = load_image(source, self._job.media)
        return {"type": "image_pil", "image_pil": image}

    def _load_parts(self, messages: Any) -> list[Message]:
        """Chat messages from a row, with their image parts loaded."""
        if not isinstance(messages, list) or not messages:
            raise RequestError(f"messages: found {_short(messages)}, expected a list of messages")
        return [self._load_message(message) for message in messages]

    def _load_message(self, message: Any) -> Message:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages: found {_short(message)}, expected role and content")
        content = message.get("content")
        if isinstance(content, str):
            return message
        if not isinstance(content, list):
            raise RequestError(f"messages: content is {_short(content)}, expected text or parts")
        return {**message, "content": [self._load_part(part) for part in content]}

    def _load_part(self, part: Any) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind in _IMAGE_PARTS:
            return self._image_part(_source_in(part))
        raise RequestError(f"messages: part {_short(part)}; known types: text, image_url, image")

    def _row_sampling(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        sampling: Mapping[str, Any] = self._sampling
        if self._user is None and isinstance(body := fields.get("body"), Mapping):
            sampling = {**sampling, **sampling_of(body)}
        column = self._job.sampling.sampling_column
        found = None if column is None else fields.get(column)
        if found is None or (isinstance(found, str) and not found):
            return sampling
        own = found
        if isinstance(own, str):
            try:
                own = orjson.loads(own)
            except orjson.JSONDecodeError:
                own = None
        if not isinstance(own, Mapping):
            raise RequestError(
                f"{column}: found {_short(found)}, expected a table of sampling parameters"
            )
        return {**sampling, **own}

    def _source(self, key: str, text: str | None, path: str | None) -> _Source | None:
        if path is None:
            return None if text is None else _Source(f"prompt.{key}", text)
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise JobError(f"prompt.{key}_file: {path}: can't be read: {reason}") from error
        return _Source(f"prompt.{key}_file: {path}", text)

    def _compile(self, source: _Source | None) -> RowTemplate | None:
        return None if source is None else self._template(*source)

    def _names_in(self, sources: Sequence[_Source | None]) -> set[str]:
        """The names that the templates read, from the row or from ``[vars]``."""
        return set[str]().union(*(fields_read(source.text) for source in sources if source))

    def _order_of_names(self, sources: Sequence[_Source | None]) -> dict[str, None]:
        """The row's fields that the templates read, in their order."""
        read = self._names - self._job.vars.keys()
        found = (name for source in sources if source for name in names_in_order(source.text))
        return dict.fromkeys(name for name in found if name in read)

    def _template(self, key: str, text: str, *, keeps_type: bool = False) -> RowTemplate:
        timeout_s = self._job.run.row_timeout_s
        return RowTemplate(key, text, timeout_s=timeout_s, keeps_type=keeps_type)


def _with_texts_of_files(job: JobConfig, system: _Source | None, user: _Source | None) -> JobConfig:
    texts = {
        "system": system and system.text,
        "system_file": None,
        "user": user and user.text,
        "user_file": None,
    }
    return job.model_copy(update={"prompt": job.prompt.model_copy(update=texts)})


def _sources_in(messages: Any) -> list[Any]:
    """The sources of all image parts; a value that is not a chat message has none."""
    return [
        _source_in(part)
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS
    ]


def _source_in(part: Mapping[str, Any]) -> Any:
    """The source that an image part names."""
    if part["type"] == "image_url":
        url = part.get("image_url")
        return url.get("url") if isinstance(url, Mapping) else url
    image = part.get("image")  # may be an array, which is neither true nor false
    return part.get("image_pil") if image is None else image


def _known_by(source: Any) -> str:
    """A path or URL itself; otherwise a hash of the image's content, or its identity."""
    if isinstance(source, str):
        return source if len(source) < _BEGINNING else str(crc32(source.encode()))
    return str(crc32(source)) if isinstance(source, bytes) else str(id(source))


def _with_text(message: Message, text: str) -> Message:
    """``message`` with ``text`` after its last text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + text}
    return {**message, "content": [*content, {"type": "text", "text": text}]}


def _as_list(found: Any) -> list[Any]:
    if found is None or (isinstance(found, str | list) and not found):
        raise MediaError("the row names no image: the template gave nothing")
    return found if isinstance(found, list) else [found]


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(map(str, fields)) or "no fields"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # the value's own code runs here
        text = f"({type(value).__name__})"
    return text if len(text) <= 80 else text[:77] + "…"


def with_temperature(
    sampling: Mapping[str, Any], attempt: int, retry: RetryTable
) -> Mapping[str, Any]:
    """``sampling`` with the temperature that ``retry.temperatures`` gives for ``attempt``, from 1."""
    if not retry.temperatures:
        return sampling
    last = len(retry.temperatures) - 1
    return {**sampling, "temperature": retry.temperatures[min(attempt - 1, last)]}
