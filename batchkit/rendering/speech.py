"""The recording of a row of ``task = "transcribe"``, and the requests for its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from batchkit.config.tables import JobConfig
from batchkit.errors import PromptTooLongError, RequestError, RowError
from batchkit.rendering.media import load_media
from batchkit.rendering.media.sound import Part, Sound, Span
from batchkit.rendering.messages import Message
from batchkit.rendering.renderer import AdjustSampling, LoadMedia, PromptRenderer
from batchkit.rendering.templates import RowTemplate
from batchkit.sources.reader import shown
from batchkit.sources.rowhash import input_hash
from batchkit.types import Audio, Completion, Request, Row, RowHint, Speech

_OF_LINES = ("file_url", "file")  # of a batch line's body: vLLM's name, and OpenAI's
_URL = "audio/transcriptions"


class Recording(NamedTuple):
    """A row's, decoded. ``request`` asks about all of it, and holds its samples."""

    request: Request
    sound: Sound
    parts: Sequence[Part]

    def request_for(self, span: Span) -> Request:
        """The request for what is heard in ``span``."""
        (audio,) = self.request.clips
        first, last = (round(at * audio.sample_rate) for at in span)
        heard = Audio(audio.samples[first:last], audio.sample_rate)
        return replace(self.request, clips=[heard], media_bytes=0)  # the recording holds them


class SpeechRenderer:
    """As ``PromptRenderer``, for a job that transcribes; what makes one request makes that for a recording's first part.

    Raises:
        JobError: a template of the job can't be used.
    """

    def __init__(
        self,
        job: JobConfig,
        *,
        adjust_sampling: AdjustSampling | None = None,
        load: LoadMedia = load_media,
    ) -> None:
        plain = {"user": "", "chat": False}
        self.job = job
        self._of_recordings = PromptRenderer(
            job.model_copy(update={"prompt": job.prompt.model_copy(update=plain)}),
            adjust_sampling=adjust_sampling,
            load=load,
        )
        self._load, self._speech = load, job.speech
        self._texts = {
            name: RowTemplate(f"speech.{name}", text, timeout_s=job.run.row_timeout_s)
            for name in ("language", "prompt")
            if (text := getattr(job.speech, name)) is not None
        }
        self.templates = self._of_recordings.templates
        self.takes_long = self._of_recordings.takes_long
        self.opens_files = True

    def recording(self, row: Row, attempt: int = 1) -> Recording:
        """The row's, decoded, and cut into parts.

        Raises:
            RowError: as ``PromptRenderer.render``.
        """
        if row.error is not None:
            raise row.error
        request = self._whole(row, attempt)
        sound = Sound(request.clips[0])
        return Recording(
            request, sound, sound.parts(self._speech.part_seconds, self._speech.overlap_seconds)
        )

    def render(self, row: Row, attempt: int = 1) -> Request:
        found = self.recording(row, attempt)
        first = found.request_for(found.parts[0].heard)
        return replace(first, media_bytes=first.clips[0].n_bytes)

    def render_or_fail(self, row: Row, attempt: int = 1) -> Request | Completion:
        try:
            return self.render(row, attempt)
        except RowError as error:
            request = Request(row, None, None, {}, input_hash(row.fields), attempt)
            return Completion(request, error=error)

    def messages(self, messages: Any) -> list[Message]:
        return self._of_recordings.messages(messages)

    def shortened(self, request: Request, error: PromptTooLongError) -> Request | None:
        return None  # a recording's end is never left out

    def image_sources(self, row: Row) -> list[Any]:
        return []

    def hint(self, row: Row) -> RowHint:
        return self._of_recordings.hint(row)

    def _whole(self, row: Row, attempt: int) -> Request:
        if self.job.prompt.audios:
            request = self._of_recordings.render(row, attempt)
            if len(request.clips) != 1:
                raise RequestError(
                    f"prompt.audios: found {len(request.clips)} recordings, expected one a row; give each"
                    " a row of its own"
                )
            names = {**self.job.vars, **row.fields}
            texts = {name: text.text(names).strip() for name, text in self._texts.items()}
            return replace(request, speech=self._asked(texts))
        return self._of_line(row, attempt)

    def _of_line(self, row: Row, attempt: int) -> Request:
        """Of a line of a batch file."""
        body, url = row.fields.get("body"), str(row.fields.get("url", ""))
        if not isinstance(body, Mapping) or not url.endswith(f"/{_URL}"):
            raise RequestError(
                f"nothing to transcribe: prompt.audios is not set, and the row is no line for /v1/{_URL}"
            )
        source = next((body[name] for name in _OF_LINES if body.get(name)), None)
        if not isinstance(source, str):
            raise RequestError(f"body: found {shown(source)} as file_url, expected a path or URL")
        audio = self._load("audio", source, self.job.media)
        assert isinstance(audio, Audio)
        sampling = dict(self.job.params())
        if isinstance(body.get("temperature"), int | float):
            sampling["temperature"] = body["temperature"]
        texts = {name: value for name in ("language", "prompt") if (value := body.get(name))}
        return Request(
            row,
            None,
            "",
            sampling,
            input_hash(row.fields),
            attempt,
            audio.n_bytes,
            clips=[audio],
            endpoint=_URL,
            speech=self._asked(texts),
        )

    def _asked(self, texts: Mapping[str, str]) -> Speech:
        return Speech(
            texts.get("language") or None, texts.get("prompt", ""), self._speech.timestamps
        )
