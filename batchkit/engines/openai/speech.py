"""``/v1/audio/transcriptions``: sends one chunk of a recording as a WAV file in a form, and reads timed segments.

See https://platform.openai.com/docs/api-reference/audio/createTranscription, with the additions of `vllm serve`. No
code here touches the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from secrets import token_hex
from struct import pack
from typing import Any

import msgspec

from batchkit.engines.openai.api import ShapeError
from batchkit.engines.openai.chat import Endpoint, as_shape, usage_in
from batchkit.engines.openai.connections import Content
from batchkit.errors import MediaError, RequestError
from batchkit.storage.plain_json import valid
from batchkit.types import Audio, Choice, Completion, Request

_MOST_BYTES = 25 * 2**20  # OpenAI's limit, and vLLM's
_RENAMED = {"max_tokens": "max_completion_tokens"}


class _SpeechSegment(msgspec.Struct):
    start: float
    end: float
    text: str


class _SpeechAnswer(msgspec.Struct):
    text: str | None = None
    segments: list[_SpeechSegment] | None = None
    usage: Any = None
    error: Any = None


class Transcriptions(Endpoint):
    """The transcription endpoint. Whisper's timestamp tokens are added to the server's answers, as in the answers of a
    local model."""

    task, table, path = "transcribe", "sampling", "/audio/transcriptions"
    parameters = (
        *("temperature", "max_tokens", "top_p", "top_k", "min_p", "seed"),
        *("frequency_penalty", "repetition_penalty", "presence_penalty"),
    )

    def input_of(self, request: Request) -> dict[str, Any]:
        speech, (audio,) = request.speech, request.clips
        assert speech is not None
        form = {"file": audio, "language": speech.language, "prompt": speech.prompt}
        form["response_format"] = "verbose_json" if speech.timestamps else "json"
        if speech.timestamps:
            form["timestamp_granularities[]"] = "segment"
        return {name: value for name, value in form.items() if value}

    def parameters_of(self, request: Request, given: dict[str, Any]) -> dict[str, Any]:
        return {_RENAMED.get(name, name): value for name, value in given.items()}

    def encoded(self, body: Mapping[str, Any]) -> Content:
        boundary = token_hex(16)
        parts = [_field(name, value) for name, value in body.items()]
        lines = [b"--%b\r\n%b\r\n" % (boundary.encode(), part) for part in parts]
        content = b"".join([*lines, b"--%b--\r\n" % boundary.encode()])
        return Content(content, f"multipart/form-data; boundary={boundary}")

    def completion_of(self, request: Request, answer: Any, latency_s: float, n: int) -> Completion:
        found = as_shape(answer, _SpeechAnswer)
        if found.text is None:
            raise ShapeError("the answer has no text")
        text = valid(found.text)
        if found.segments:
            stamped = (f"<|{s.start:.2f}|>{valid(s.text)}<|{s.end:.2f}|>" for s in found.segments)
            text = "".join(stamped)
        usage = usage_in(found.usage, "input_tokens", "output_tokens")
        return Completion(request, [Choice(text, "stop")], usage, latency_s)


def _field(name: str, value: Any) -> bytes:
    if isinstance(value, Audio):
        data = _wav(value)
        if len(data) > _MOST_BYTES:
            raise MediaError(
                f"{value.in_words}: has {len(data):,} bytes, but servers accept {_MOST_BYTES:,}; lower"
                " speech.part_seconds"
            )
        head = f'Content-Disposition: form-data; name="{name}"; filename="part.wav"\r\n'
        return f"{head}Content-Type: audio/wav\r\n\r\n".encode() + data
    if not isinstance(value, str | int | float):
        raise RequestError(
            f"{name}: found a {type(value).__name__}, but a form accepts only texts and numbers"
        )
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f'Content-Disposition: form-data; name="{name}"\r\n\r\n{text}'.encode()


def _wav(sound: Audio) -> bytes:
    """Return the sound as a WAV file with float samples.

    16-bit samples would be noise for the model, because a vLLM server without ``soundfile`` does not scale them.
    """
    data = sound.samples.astype("<f4").tobytes()
    rate, size = sound.sample_rate, 4  # bytes of a sample
    form = pack("<HHIIHH", 3, 1, rate, size * rate, size, 8 * size)
    chunks = b"".join(
        name + pack("<I", len(of)) + of for name, of in ((b"fmt ", form), (b"data", data))
    )
    return b"RIFF" + pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
