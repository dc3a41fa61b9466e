"""``task = "transcribe"`` as a coroutine: transcribes the chunks of a recording concurrently, then joins the texts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from msgspec.structs import replace

from batchkit.errors import EmptyTextError, RowError
from batchkit.execution.rollouts.open_row import OpenRow
from batchkit.execution.start import Start
from batchkit.rendering.media.sound import Sound, SoundPart, Span
from batchkit.rendering.speech import Recording, SpeechRenderer
from batchkit.types import Choice, Completion, Coverage, Request, Segment, Transcript

LANGUAGE, PART, AGAIN = "language", "part", "again"
"""Step names of a recording's generations: its language, each chunk, and sound that the answer left out."""
_LANGUAGE = re.compile(r"<\|([a-z]+)\|>")
_STAMP = re.compile(r"<\|(\d+\.\d+)\|>")
_MARK = re.compile(r"<\|[^|<>]*\|>")
_LEAD_S = 0.3  # context on both sides of sound that is transcribed again
_S_PER_LETTER = 1.5  # most sound per letter of text: speech has 4 to 15 letters a second
_LETTER = re.compile(r"\w")
_SAME_WORDS = 12  # words compared on each side of a cut within speech
_WITHOUT_SPACES = ("ja", "zh", "yue", "th", "lo", "my")


class Transcription:
    """A solver that answers rows with the transcripts of their recordings."""

    def __init__(self, start: Start) -> None:
        assert isinstance(start.renderer, SpeechRenderer)
        self._renderer = start.renderer

    async def solve(self, row: OpenRow) -> Completion:
        """Return the outcome of the row: its transcript, or the error of a chunk."""
        found: list[Recording] = []

        def open_recording() -> Request:
            found.append(self._renderer.recording(row.row, row.task.attempt))
            return found[0].request

        try:
            request = await row.opened(open_recording)
            try:
                return await self._transcribed(row, found[0])
            finally:
                row.close(request)
        except RowError as error:
            return row.failed(error)

    async def _transcribed(self, row: OpenRow, recording: Recording) -> Completion:
        if self._renderer.finds_language and recording.speech.language is None:
            recording = recording.asked_with(language=await _language(row, recording))
        tasks = [asyncio.ensure_future(_heard(row, recording, part)) for part in recording.parts]
        try:
            of_parts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        segments = joined(recording.parts, of_parts)
        sound, language = recording.sound, recording.speech.language
        space = "" if language in _WITHOUT_SPACES else " "
        text = space.join(segment["text"] for segment in segments)
        outcome = row.outcome(None, [Choice(text, "stop")])
        seconds, coverage = round(sound.seconds, 3), coverage_of(segments, sound)
        return replace(outcome, transcript=Transcript(seconds, segments, coverage, language))


async def _language(row: OpenRow, recording: Recording) -> str | None:
    """Ask the model for the recording's language and return it; None if the answer names none."""
    completion = await row.ask(recording.language_request, LANGUAGE, takes_long=False)
    assert completion is not None
    if completion.error is not None and not isinstance(completion.error, EmptyTextError):
        raise completion.error
    found = None if completion.error is not None else _LANGUAGE.fullmatch(completion.text.strip())
    return found and found[1]


async def _heard(row: OpenRow, recording: Recording, part: SoundPart) -> list[Segment]:
    """Transcribe a chunk and return its segments. Speech in the chunk for which the answer has no text is transcribed
    once more, alone."""
    segments = await _asked(row, recording, part.heard, PART)
    sound = recording.sound
    sure = _credible(segments, sound)
    if not (gaps := sound.without(_spans(sure), part.own)):
        return segments
    first, last = round(gaps[0].start, 3), round(gaps[-1].end, 3)
    span = Span(max(part.heard.start, first - _LEAD_S), min(part.heard.end, last + _LEAD_S))
    again = await _asked(row, recording, span, AGAIN)
    new = [
        # The context of ``span`` belongs to the segments around it.
        Segment(start=max(its["start"], first), end=min(its["end"], last), text=its["text"])
        for its in again
        if first < (at := _middle(its)) < last and not any(a < at < b for a, b in _spans(sure))
    ]
    return sorted([*(sure if new else segments), *new], key=lambda segment: segment["start"])


async def _asked(row: OpenRow, recording: Recording, span: Span, step: str) -> list[Segment]:
    completion = await row.ask(lambda: recording.request_for(span), step, takes_long=False)
    assert completion is not None
    if completion.error is None:
        found = segments_in(completion.text, span, completion.finish_reason)
        # Models invent words for silence.
        spoken = [its for its in found if not recording.sound.is_silent(its["start"], its["end"])]
        return [_placed(segment, recording.sound) for segment in spoken]
    if isinstance(completion.error, EmptyTextError):  # silence, or the model left the speech out
        return []
    raise completion.error


def _placed(segment: Segment, sound: Sound) -> Segment:
    """Return the segment without long silence at its ends: Whisper's first segment often starts where the chunk does,
    even if the first word comes seconds later."""
    span = sound.without_silent_ends(segment["start"], segment["end"])
    return Segment(start=round(span.start, 3), end=round(span.end, 3), text=segment["text"])


def segments_in(text: str, span: Span, finish_reason: str | None) -> list[Segment]:
    """Return the segments of a model's answer, split at the time stamps in it. ``span``: the sound that the model got.

    An answer without time stamps is one segment. If the last segment has no end, it lasts until the end of ``span``,
    unless the answer was cut off.
    """
    if not _STAMP.search(text):
        plain = _plain(text)
        return [Segment(start=span.start, end=span.end, text=plain)] if plain else []
    first, *rest = _STAMP.split(text)
    times = [0.0, *map(float, rest[::2])]
    is_cut_off = finish_reason == "length"
    times.append(times[-1] if is_cut_off else span.seconds)
    found = []
    for n, piece in enumerate([first, *rest[1::2]]):
        if plain := _plain(piece):
            start, end = (min(span.start + time, span.end) for time in times[n : n + 2])
            segment = Segment(start=round(start, 3), end=round(max(start, end), 3), text=plain)
            found.append(segment)
    return found


def joined(parts: Sequence[SoundPart], of_parts: Sequence[list[Segment]]) -> list[Segment]:
    """Join the segments of neighboring chunks, whose sound overlaps.

    A segment is kept if its middle is in its chunk's ``own`` span; the own spans don't overlap. Where two chunks meet,
    the last segment of the first one ends before the first segment of the second one begins.
    """
    found: list[Segment] = []
    was_cut = False
    for part, segments in zip(parts, of_parts, strict=True):
        is_last = part is parts[-1]
        own = [
            its
            for its in segments
            if (part.own.start <= _middle(its) or part is parts[0])
            and (_middle(its) < part.own.end or is_last)
        ]
        if was_cut and found and own:
            text = _without_repeat(found[-1]["text"], own[0]["text"])
            own[0] = Segment(**own[0] | {"text": text})
        own = [its for its in own if its["text"]]
        if found and own and own[0]["start"] < found[-1]["end"]:
            # A chunk that is not cut within speech begins in the middle of a silence.
            meeting = found[-1]["end"] if was_cut else round(part.own.start, 3)
            found[-1] = Segment(**found[-1] | {"end": min(found[-1]["end"], meeting)})
            start = min(max(own[0]["start"], meeting), own[0]["end"])
            own[0] = Segment(**own[0] | {"start": start})
        found += own
        was_cut = part.is_cut
    return found


def coverage_of(segments: Sequence[Segment], sound: Sound) -> Coverage | None:
    """Return the parts of the sound that no segment covers; None if segments cover all of it."""
    gaps = sound.without(_spans(_credible(segments, sound)), Span(0, sound.seconds))
    if not gaps:
        return None
    missing_s = round(sum(gap.seconds for gap in gaps), 2)
    return Coverage(missing_s=missing_s, gaps=[[round(at, 2) for at in gap] for gap in gaps])


def _credible(segments: Iterable[Segment], sound: Sound) -> list[Segment]:
    """Return the segments that have enough letters for their length. A segment with fewer letters lacks some speech."""
    found = []
    for segment in segments:
        sound_s = sound.seconds_in(segment["start"], segment["end"])
        if len(_LETTER.findall(segment["text"])) >= max(1, sound_s / _S_PER_LETTER):
            found.append(segment)
    return found


def _without_repeat(before: str, text: str) -> str:
    """Return ``text`` without first words that repeat the last words of ``before``, the segment before it."""
    left, right = before.split()[-_SAME_WORDS:], text.split()
    same = SequenceMatcher(
        None, [*map(_bare, left)], [*map(_bare, right[:_SAME_WORDS])], autojunk=False
    )
    match = same.find_longest_match()
    reaches_end = match.size and match.a + match.size == len(left)
    return " ".join(right[match.b + match.size :]) if reaches_end else text


def _bare(word: str) -> str:
    return re.sub(r"\W", "", word).lower()


def _plain(text: str) -> str:
    return _MARK.sub("", text).strip()


def _middle(segment: Segment) -> float:
    return (segment["start"] + segment["end"]) / 2


def _spans(segments: Iterable[Segment]) -> list[tuple[float, float]]:
    return [(segment["start"], segment["end"]) for segment in segments]
