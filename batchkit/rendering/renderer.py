"""Rendering of a row to a request: fills in templates, loads images, merges sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from secrets import token_hex
from types import MappingProxyType
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from batchkit.config.loading import prompt_columns
from batchkit.config.tables import JobConfig, MediaTable, TaskName
from batchkit.errors import PromptTooLongError, RequestError, RowError, TemplateError
from batchkit.rendering.body import (
    contents_of,
    endpoint_of,
    in_chat_terms,
    input_of,
    messages_of,
    pooling_of,
    row_sampling,
    sides_of,
    task_of,
    texts_in,
    with_temperature,
)
from batchkit.rendering.media import Media, SharedMedia, load_for_server, load_media, load_text
from batchkit.rendering.media.source import check_root
from batchkit.rendering.messages import (
    Message,
    image_part,
    loaded,
    media_sources,
    placed,
    with_parts,
)
from batchkit.rendering.pairs import pair_of
from batchkit.rendering.templates import ROW, RowTemplate
from batchkit.rendering.templates.prompt import PromptTemplates, number_of, sources_of
from batchkit.rendering.tools import RequestTools, template_kwargs_of, tools_of_body
from batchkit.rendering.truncation import TextPlace, cut_at, longest_text, next_cut
from batchkit.sources.reader import one_of, shown
from batchkit.sources.rowhash import input_hash
from batchkit.sources.where import is_blank
from batchkit.storage.schema import is_count
from batchkit.types import CLIPS, Clip, Pair, Request, Row, RowHint

_BYTES_PER_PIXEL = 4  # Pillow's memory for RGB
# Parameters of [pooling] that apply only to lines of the job's own task.
_OF_ITS_TASK = ("dimensions", "use_activation", "max_tokens_per_query", "max_tokens_per_doc")
_BEGINNING = 4096  # characters of the prefix by which prompts are compared

AdjustSampling = Callable[[Mapping[str, Any]], Mapping[str, Any]]
LoadMedia = Callable[[str, Any, MediaTable], Media]


class PromptRenderer:
    """A renderer that turns the rows of one job into requests. Several threads may share it.

    - ``load``: decodes an image or a clip, by default to the form that the job's engine takes. Called by several
      threads.
    - ``adjust_sampling``: adapts a row's sampling parameters to the engine. Called by several threads.
    - ``chat_template_kwargs``: variables for the chat template, added to each request. The engine's options may have
      more.

    Raises:
        JobError: a template or template file of the job is invalid, or its ``media.root`` is a URL that can't be
            opened.
    """

    def __init__(
        self,
        job: JobConfig,
        *,
        adjust_sampling: AdjustSampling | None = None,
        load: LoadMedia | None = None,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._adjust_sampling = adjust_sampling
        of_engine = load_for_server if job.engine.kind == "openai-server" else load_media
        self._load = load or of_engine
        self._chat_template_kwargs = chat_template_kwargs
        self._job = job
        self._filled = prompt_columns(job) if job.input.empty == "fail" else frozenset()
        self.templates = PromptTemplates(job)
        if self.templates.files.all:
            check_root(job.media)
        self._system, self._user = self.templates.system, self.templates.user
        # The text that marks the place of an image or a clip, by kind. It is random, so that no row contains it.
        marks = self._user.marks if self._user else ()
        self._places = {kind: f"<{kind} {token_hex(8)}>" for kind in marks}
        self._sampling, self._loras = job.params(), job.engine.loras
        self._shared = SharedMedia()
        self.job = self.templates.job
        """The job with the texts of its template files, which are read only once."""
        self.takes_long = self.templates.takes_long
        """True if a row's templates are rendered in a separate process."""
        self.opens_files = bool(self.templates.files.all) or self._user is None
        """False if no row's prompt has an image, a clip or the text of a file."""

    def messages(self, messages: Any) -> list[Message]:
        """Return chat messages with their images and clips loaded.

        Raises:
            RowError: ``messages`` is not a list of chat messages, or an image or a clip can't be opened.
        """
        return loaded(messages, self._part)

    def render(self, row: Row, attempt: int = 1, of_input: str | None = None) -> Request:
        """Return the request for ``row``, with decoded images and clips.

        ``of_input``: the row's input hash; None computes it from the row's fields.

        Raises:
            RowError: the row can't be rendered. Any other exception is an error of the machine, not of the row.
        """
        if row.error is not None:
            raise row.error
        of_input = input_hash(row.fields) if of_input is None else of_input
        for name in self._filled:
            if name in row.fields and is_blank(row.fields[name]):
                raise RequestError(
                    f'the field {name} is empty, and input.empty = "fail" refuses such rows'
                )
        note = self.templates.note(row.fields)
        return self._request(row, self._with_texts(row.fields), attempt, of_input, note)

    def _request(
        self, row: Row, fields: Mapping[str, Any], attempt: int, of_input: str, note: str
    ) -> Request:
        """Return the request for ``row``, rendered from ``fields`` instead of the row's own fields.

        ``fields``: the row's fields, with the texts of its files. If an earlier prompt was too long, one of the texts
        is cut.
        """
        own, endpoint = self._own_prompt(fields), None
        if own == "body":
            endpoint = endpoint_of(fields.get("url"), self._job.task)
        task = task_of(endpoint, self._job.task)
        pair, messages, prompt = None, None, None
        if task == "score":
            pair = self._pair(fields)
        else:
            messages, prompt = self._content(fields, own)
        body = fields.get("body") if own == "body" else None
        body = body if isinstance(body, Mapping) else {}
        tools = self._tools(fields, body)
        if tools.tools and messages is None:
            raise RequestError(
                "tools need chat messages, but the row has a plain prompt; leave the tools out, or send"
                " messages (prompt.chat = true)"
            )
        request = Request(
            row=row,
            lora=self._lora(fields),
            clips=self._own_clips(fields) if prompt is not None else [],
            messages=messages,
            prompt=prompt,
            pair=pair,
            sampling=with_temperature(
                self._row_sampling(fields, own, task), attempt, self._job.retry
            ),
            input_hash=of_input,
            endpoint=endpoint,
            attempt=attempt,
            note=note,
            tools=tools.tools,
            tool_choice=tools.tool_choice,
            parallel_tool_calls=tools.parallel_tool_calls,
            chat_template_kwargs={
                **self._chat_template_kwargs,
                **(template_kwargs_of(body) if body else {}),
            },
        )
        return with_media_bytes(request) if self.opens_files else request

    def shortened(self, request: Request, error: PromptTooLongError) -> Request | None:
        """Return ``request`` with the longest text of its row cut in the middle. ``error`` has the length of the prompt
        in tokens.

        Returns None if no cut helps, or if ``retry.on_too_long`` is not "truncate-middle". If the prompt of the result
        is still too long, call this method again with the result; the next cut is larger.
        """
        if self._job.retry.on_too_long != "truncate-middle":
            return None
        row = request.row
        try:
            whole = self._with_texts(row.fields)
            place = self._longest_text(row, whole)
            wanted = request.sampling.get("max_tokens")  # may be any value if it comes from the row
            max_tokens = wanted if wanted and is_count(wanted) else 0
            cut = place and next_cut(place.length, request.cut, error, max_tokens)
            if not place or not cut:
                return None
            fields = cut_at(whole, place.path, cut.kept)
            shorter = self._request(row, fields, request.attempt, request.input_hash, request.note)
        except RowError:  # the template can't be rendered with the cut text
            return None
        kept = {
            name: getattr(request, name) for name in ("sampling", "media_bytes", "request_hash")
        }
        return replace(shorter, cut=cut, **kept)

    def sources(self, row: Row) -> list[tuple[str, Any]]:
        """Return (kind, source) for each image of the row, then for each clip. No file is opened.

        Raises:
            RowError: as for ``render``.
        """
        return [
            (kind, source)
            for kind, templates in self.templates.files.by_kind.items()
            for source in self._sources(row, templates, kind)
        ]

    def _sources(self, row: Row, templates: Sequence[RowTemplate], *kinds: str) -> list[Any]:
        own = self._own_prompt(row.fields)
        if own == "messages":
            return media_sources(row.fields["messages"], *kinds)
        if own == "body":
            return media_sources(contents_of(self._line(row.fields)["body"]), *kinds)
        return [found for template in templates for found in sources_of(template, row.fields)]

    def hint(self, row: Row) -> RowHint:
        """Return a forecast of the row's request, by which rows are ordered. No file is opened.

        A row that can't be rendered gets a forecast that differs from all others.
        """
        try:
            own = self._own_prompt(row.fields)
            fields = self._line(row.fields) if own == "body" else row.fields
            max_tokens = self._row_sampling(fields, own, self._job.task).get("max_tokens")
            beginning, lora = self._files(row) or self._beginning(row), self._lora(row.fields)
        except Exception:  # the row's values may raise anything; rendering reports the error
            return RowHint(str(row.index), 0)
        return RowHint(beginning, max_tokens if isinstance(max_tokens, int) else 0, lora or "")

    def _files(self, row: Row) -> str:
        """Return a text with the names of all files in the row's prompt. Rows for which this text is equal run next to
        each other.

        Returns "" if the prompt has no files, or if their templates are rendered in a separate process.
        """
        has_text = self._user is not None or self._job.task == "score"
        files = self.templates.files.all
        if has_text and not files:
            return ""
        if any(template.is_apart for template in files):
            return ""  # rendering it here would delay all later rows
        paths = [path.text(row.fields) for path in self.templates.files.texts.values()]
        media = self._sources(row, self.templates.files.media, "image", *CLIPS)
        return "\n".join(map(_known_by, [*media, *paths]))

    def _beginning(self, row: Row) -> str:
        """Return ``RowHint.beginning`` for a row whose prompt has no images, clips or text files.

        The text consists of the first ``_BEGINNING`` characters of each field that the templates use, in the order of
        use, or of the row's own prompt. Rows for which this text is equal run next to each other.
        """
        own = self._own_prompt(row.fields)
        names = self.templates.fields_in_order if own is None else [own]
        return "\n".join([str(row.fields.get(name, row.index))[:_BEGINNING] for name in names])

    def _with_texts(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``fields`` with the text of each file in ``prompt.texts`` added. In a batch line for
        ``/v1/responses``, the body is converted to one for chat."""
        if self._own_prompt(fields) == "body":
            fields = self._line(fields)
        if not self.templates.files.texts:
            return fields
        texts = {
            name: load_text(path.text(fields), self._job.media)
            for name, path in self.templates.files.texts.items()
        }
        return {**fields, **texts}

    def _line(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the batch line ``fields``. If the job's task is "generate", a body for ``/v1/responses`` is converted
        to one for chat."""
        return in_chat_terms(fields) if self._job.task == "generate" else fields

    def _longest_text(self, row: Row, fields: Mapping[str, Any]) -> TextPlace | None:
        own = self._own_prompt(fields)
        if own is None:
            names = self.templates.names
            return longest_text(fields, names, lambda place: self._is_shown(row, fields, place))
        if own == "body":  # without its sampling and its schema
            fields = {**fields, "body": texts_in(fields["body"])}
        return longest_text(fields, self.templates.names | {own})

    def _is_shown(self, row: Row, fields: Mapping[str, Any], place: TextPlace) -> bool:
        """Return whether the prompt contains the text at ``place``. It may not, because a template can use one part of
        a field and leave out this part."""
        if len(place.path) == 1:
            return True
        try:
            without = self._request(row, cut_at(fields, place.path, 0), 1, "", "")
        except RowError:  # the template fails without the text, so the prompt needs it
            return True
        whole = self._request(row, fields, 1, "", "")
        parts = ("messages", "prompt", "pair")
        return any(getattr(without, part) != getattr(whole, part) for part in parts)

    def _own_prompt(self, fields: Mapping[str, Any]) -> str | None:
        """Return the name of the field with the row's own prompt: messages, body or prompt.

        Returns None if the job's templates make the prompt.
        """
        if self._user is not None or self._job.pair.is_set:
            return None
        if self._job.task == "score":
            return "body"
        if self._system is None and not self.templates.files.media:
            for name in ("messages", "body"):
                if name in fields:
                    return name
        return "prompt"

    def _content(
        self, fields: Mapping[str, Any], own: str | None
    ) -> tuple[Sequence[Message] | None, str | None]:
        """Return the prompt as (chat messages, plain text), one of which is None.

        ``own``: the field with the row's own prompt; None if the job's templates make the prompt.
        """
        if own == "messages":
            return loaded(fields["messages"], self._part), None
        if own == "body":
            read = messages_of if self._job.task == "generate" else input_of
            messages, prompt = read(fields["body"])
            return (None, prompt) if prompt is not None else (loaded(messages, self._part), None)
        if self._user is not None:
            text = self._user.text(self._with_places(fields))
        elif "prompt" in fields:
            text = fields["prompt"]
            if not isinstance(text, str):
                raise RequestError(
                    f"prompt: found {shown(text)}, expected text; correct the row's field"
                )
        elif self.templates.files.media:
            text = ""
        else:
            share_gpt = "conversations" in fields
            raise TemplateError(
                "nothing to send: set prompt.user, or give each row a field prompt (without prompt.system and"
                " prompt.images also messages or body); the row has"
                f" {', '.join(map(str, fields)) or 'no fields'}"
                + "; turn ShareGPT's conversations into messages of role and content"
                * share_gpt
            )
        if not self._job.prompt.chat:
            return None, text
        messages = [{"role": "user", "content": self._user_content(text, fields)}]
        if self._system is not None:
            system = self._system.text(fields)
            messages.insert(0, {"role": "system", "content": system})
        return messages, None

    def _with_places(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``fields`` with a place mark added for each kind of media, under the name of the kind, such as
        ``image``.

        In a template, ``{{ image }}`` is the place of the image. A column of this name can still be read as ``{{
        row.image }}``.
        """
        if not self._places:
            return fields
        return {ROW: {**self._job.vars, **fields}, **fields, **self._places}

    def _pair(self, fields: Mapping[str, Any]) -> Pair:
        """Return the row's query and documents, from the job's templates or from the row's body."""
        if self._job.pair.is_set:
            return pair_of(self.templates, fields, self._part)
        if "body" not in fields:
            raise TemplateError(
                'nothing to compare: set pair.query and pair.documents, or give each row a field "body" with a query and'
                f" documents, as in a request to /v1/rerank; the fields of the row are {[*map(str, fields)]}"
            )
        query, documents, is_list = sides_of(fields["body"])
        loaded_documents = [with_parts(document, self._part) for document in documents]
        return Pair(with_parts(query, self._part), loaded_documents, is_list)

    def _tools(self, fields: Mapping[str, Any], body: Mapping[str, Any]) -> RequestTools:
        """Return the tools of the row's body or, if the body has none, the job's tools."""
        of_job = partial(self.templates.tools.of_row, fields)
        return tools_of_body(body, of_job) if body else of_job()

    def _lora(self, fields: Mapping[str, Any]) -> str | None:
        """Return the name of the row's LoRA adapter, from ``prompt.lora``. Without ``prompt.lora``, return the
        ``model`` of a batch line if it is the name of an adapter, otherwise None.

        Raises:
            RequestError: the job has no adapter of this name.
        """
        if self.templates.lora is None:
            body = fields.get("body")
            asked = body.get("model") if isinstance(body, Mapping) else None
            return asked if isinstance(asked, str) and asked in self._loras else None
        value = self.templates.lora.value(fields)
        name = "" if value is None else str(value).strip()
        if name and self._loras and name not in self._loras:
            raise RequestError(
                f"prompt.lora: {shown(name)} is not in [engine.loras]; {one_of(name, self._loras)}"
            )
        return name

    def _user_content(self, text: str, fields: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        if not self.templates.files.media:
            return text
        media = {kind: self._parts(kind, fields) for kind in self.templates.files.by_kind}
        text_parts = placed(text, self._places, media)
        unmarked = chain.from_iterable(media.values())
        return [*unmarked, *text_parts]

    def _own_clips(self, fields: Mapping[str, Any]) -> list[Clip]:
        return [part[kind] for kind in CLIPS for part in self._parts(kind, fields)]

    def _parts(self, kind: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the content parts, with loaded media, of the row's media of one ``kind``."""
        templates = self.templates.files.by_kind[kind]
        return [
            self._part(kind, source) for made in templates for source in sources_of(made, fields)
        ]

    def _part(self, kind: str, source: Any) -> dict[str, Any]:
        def load() -> Any:
            return self._load(kind, source, self._job.media)

        is_name = isinstance(source, str) and len(source) < _BEGINNING  # a path or a URL
        found = self._shared.get((kind, source), load) if is_name else load()
        return {"type": kind, kind: found} if kind in CLIPS else image_part(found)

    def _row_sampling(
        self, fields: Mapping[str, Any], own: str | None, task: TaskName
    ) -> Mapping[str, Any]:
        """Return the sampling or pooling parameters of a row. ``own``: the field with the row's own prompt, or None.
        ``task``: the row's task."""
        if task != "generate":
            of_job = self._sampling
            if task != self._job.task:
                of_job = {name: of_job[name] for name in of_job if name not in _OF_ITS_TASK}
            return {**of_job, **pooling_of(fields["body"] if own == "body" else {})}
        column, of_job = self._job.sampling.sampling_column, self._sampling
        if self.templates.sampling:
            templates = self.templates.sampling.items()
            own_values = {name: number_of(template, fields) for name, template in templates}
            of_job = {**of_job, **own_values}
        found = row_sampling(of_job, fields, column=column, with_body=own == "body")
        if self._adjust_sampling is None:
            return found
        # A copy, because the function may modify the dict, which rows share.
        return self._adjust_sampling(deepcopy(found))


def with_media_bytes(request: Request) -> Request:
    """Return ``request`` with ``media_bytes`` set to the size of its decoded images and clips."""
    images = sum(_BYTES_PER_PIXEL * image.width * image.height for image in request.images)
    n_bytes = images + sum(clip.n_bytes for clip in request.all_clips)
    return replace(request, media_bytes=n_bytes) if n_bytes else request


def _known_by(source: Any) -> str:
    """Return a text that identifies ``source`` when prompts are compared: a path, a URL, a checksum, or the object's
    identity."""
    if isinstance(source, str):
        return source if len(source) < _BEGINNING else str(crc32(source.encode()))
    return str(crc32(source)) if isinstance(source, bytes) else str(id(source))
