"""Rendering for ``task = "transcribe"``: the recording of a row, and the requests for its chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from batchkit.config.tables import JobConfig
from batchkit.errors import PromptTooLongError, RequestError
from batchkit.rendering.body import endpoint_of
from batchkit.rendering.media import load_media
from batchkit.rendering.media.sound import Sound, SoundPart, Span
from batchkit.rendering.renderer import AdjustSampling, LoadMedia, PromptRenderer
from batchkit.rendering.templates import RowTemplate
from batchkit.sources.reader import shown
from batchkit.sources.rowhash import input_hash
from batchkit.types import Audio, Request, Row, RowHint, Speech

# Keys for the recording in a batch line's body: vLLM's name and OpenAI's name.
_OF_LINES = ("file_url", "file")


class Recording(NamedTuple):
    """A row's decoded recording. ``request``: a request for the whole recording, with its samples. ``sound``: the
    loudness of the recording. ``parts``: its chunks."""

    request: Request
    sound: Sound
    parts: Sequence[SoundPart]

    @property
    def speech(self) -> Speech:
        assert self.request.speech is not None
        return self.request.speech

    def asked_with(self, **changes: Any) -> Recording:
        """Return the recording with ``changes`` to the settings of its request (``speech``), for example another
        language."""
        speech = self.speech._replace(**changes)
        return self._replace(request=replace(self.request, speech=speech))

    def language_request(self) -> Request:
        """Return a request whose answer is only the language spoken in the first chunk that has sound."""
        part = next((it for it in self.parts if self.sound.without((), it.own)), self.parts[0])
        asked = self.asked_with(asks_language=True).request_for(part.heard)
        return replace(asked, sampling={"temperature": 0.0, "max_tokens": 1})

    def request_for(self, span: Span) -> Request:
        """Return the request to transcribe the sound in ``span``."""
        (audio,) = self.request.clips
        first, last = (round(at * audio.sample_rate) for at in span)
        heard = Audio(audio.samples[first:last], audio.sample_rate)
        # media_bytes is 0, because ``self.request`` already counts the samples of the whole recording.
        return replace(self.request, clips=[heard], media_bytes=0)


class SpeechRenderer:
    """A renderer for a job that transcribes. It has the interface of ``PromptRenderer``.

    ``recording`` returns all chunks of a row's recording; ``render`` returns only the request for the first chunk.

    Raises:
        JobError: a template of the job is invalid.
    """

    def __init__(
        self,
        job: JobConfig,
        *,
        adjust_sampling: AdjustSampling | None = None,
        load: LoadMedia | None = None,
    ) -> None:
        self.job = job
        self._of_recordings = PromptRenderer(
            job.with_keys(prompt={"user": "", "chat": False}),
            adjust_sampling=adjust_sampling,
            load=load,
        )
        self._load, self._speech = load or load_media, job.speech
        self._texts = {
            name: RowTemplate(job, f"speech.{name}", text)
            for name in ("language", "prompt")
            if (text := getattr(job.speech, name)) is not None
        }
        self.takes_long = self._of_recordings.takes_long
        self.opens_files = True
        self.finds_language = job.engine.kind == "vllm"  # servers detect the language themselves

    def recording(self, row: Row, attempt: int = 1) -> Recording:
        """Return the row's recording, decoded and cut into chunks.

        Raises:
            RowError: as for ``PromptRenderer.render``.
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
        if self.finds_language and found.speech.language is None:
            first = found.language_request()
        speech = first.speech and first.speech._replace(seconds=found.sound.seconds)
        return replace(first, media_bytes=first.clips[0].n_bytes, speech=speech)

    def shortened(self, request: Request, error: PromptTooLongError) -> Request | None:
        return None  # a recording is never shortened

    def sources(self, row: Row) -> list[tuple[str, Any]]:
        if self.job.prompt.audios:
            return self._of_recordings.sources(row)
        body = row.fields.get("body")
        source = _named_in(body) if isinstance(body, Mapping) else row.fields.get("path")
        return [] if source is None else [("audio", source)]

    def hint(self, row: Row) -> RowHint:
        return self._of_recordings.hint(row)

    def _whole(self, row: Row, attempt: int) -> Request:
        body = row.fields.get("body")
        if not self.job.prompt.audios and isinstance(body, Mapping):
            return self._of_line(row, attempt, body)
        texts = {name: text.text(row.fields).strip() for name, text in self._texts.items()}
        if self.job.prompt.audios:
            request = self._of_recordings.render(row, attempt)
            if len(request.clips) != 1:
                raise RequestError(
                    f"prompt.audios: found {len(request.clips)} recordings, expected one; write one row for"
                    " each recording"
                )
            return replace(request, speech=self._asked(texts))
        # The field is set if the input is a folder of clips.
        if not isinstance(path := row.fields.get("path"), str):
            raise RequestError(
                'nothing to transcribe: set prompt.audios, for example to ["{{ recording }}"]; the row has'
                f" {', '.join(map(str, row.fields)) or 'no fields'}"
            )
        return self._made(row, attempt, path, texts)

    def _of_line(self, row: Row, attempt: int, body: Mapping[str, Any]) -> Request:
        endpoint = endpoint_of(row.fields.get("url"), "transcribe")
        source = _named_in(body)
        if not isinstance(source, str):
            raise RequestError(f"body: found {shown(source)} as file_url, expected a path or URL")
        texts = {name: str(value) for name in ("language", "prompt") if (value := body.get(name))}
        made = self._made(row, attempt, source, texts)
        sampling = dict(made.sampling)
        if isinstance(body.get("temperature"), int | float):
            sampling["temperature"] = body["temperature"]
        return replace(made, sampling=sampling, endpoint=endpoint)

    def _made(self, row: Row, attempt: int, source: str, texts: Mapping[str, str]) -> Request:
        audio = self._load("audio", source, self.job.media)
        assert isinstance(audio, Audio)
        return Request(
            row,
            None,
            "",
            self.job.params(),
            input_hash(row.fields),
            attempt,
            audio.n_bytes,
            clips=[audio],
            speech=self._asked(texts),
        )

    def _asked(self, texts: Mapping[str, str]) -> Speech:
        language, prompt = texts.get("language"), texts.get("prompt", "")
        return Speech(language or None, prompt, self._speech.timestamps)


def _named_in(body: Mapping[str, Any]) -> Any:
    return next((body[name] for name in _OF_LINES if body.get(name)), None)
