"""Detection of sound and silence in a recording, to cut it into chunks that are short enough for a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchkit.types import Audio

FRAME_S = 0.02
_FLOOR_DB = -60.0  # anything quieter counts as silence
# Thresholds between the loudness of the noise (0) and of the loud parts (1), on the dB scale.
_OVER_NOISE = 0.3  # louder frames have sound
_OVER_SILENCE = 0.1  # quieter frames have only noise
# A threshold is at least this far below the loud parts, but not below _FLOOR_DB.
_UNDER_LOUD_DB = 10.0
_SHORTEST_PAUSE_S = 0.1
_NEAR_S = 0.1  # assumed precision of a model's time stamps
_SHORTEST_SOUND_S = 0.14
_LONG_SILENCE_S = 1.0


class Span(NamedTuple):
    """A time span, in seconds from the recording's start."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class SoundPart(NamedTuple):
    """A chunk of a recording, which is sent to the model as one request.

    - ``heard``: the span whose sound the model gets. It overlaps the ``heard`` spans of the neighboring chunks.
    - ``own``: the part of ``heard`` whose text is kept. The ``own`` spans of all chunks cover the recording once.
    - ``is_cut``: the chunk ends within speech, because there was no silence.
    """

    own: Span
    heard: Span
    is_cut: bool = False


class Sound:
    """The loudness of a recording in frames of 20 ms.

    A frame has sound if it is louder than a threshold between the recording's noise and its loud parts.
    """

    def __init__(self, audio: Audio) -> None:
        self.seconds = audio.seconds
        self._db = _loudness(audio)
        self._has_sound = self._db > _threshold(self._db, _OVER_NOISE)
        self._is_silent = self._db <= _threshold(self._db, _OVER_SILENCE)

    def is_silent(self, start: float, end: float) -> bool:
        """Return whether there is only noise from 0.1 s before ``start`` to 0.1 s after ``end``."""
        first, last = _frame(start - _NEAR_S), max(_frame(start), _frame(end + _NEAR_S))
        return bool(self._is_silent[first:last].all())

    def without_silent_ends(self, start: float, end: float) -> Span:
        """Return the span from ``start`` to ``end``, without noise of more than 1 s before its first or behind its last
        sound. The last 0.1 s of that noise stay. A span with only noise is returned as it is."""
        first = _frame(start)
        frames = np.flatnonzero(~self._is_silent[first : _frame(end)]).tolist()
        if not frames:
            return Span(start, end)
        first_sound, last_sound = ((first + at) * FRAME_S for at in (frames[0], frames[-1] + 1))
        return Span(
            first_sound - _NEAR_S if first_sound - start > _LONG_SILENCE_S else start,
            last_sound + _NEAR_S if end - last_sound > _LONG_SILENCE_S else end,
        )

    def seconds_in(self, start: float, end: float) -> float:
        """Return how many seconds between ``start`` and ``end`` have sound."""
        return float(self._has_sound[_frame(start) : _frame(end)].sum() * FRAME_S)

    def without(self, covered: Iterable[tuple[float, float]], within: Span) -> list[Span]:
        """Return the spans with sound inside ``within`` that are in no span of ``covered``.

        The result shows for which sound a transcript has no text. Sound within 0.1 s of a covered span, and spans
        shorter than 0.14 s, are left out.
        """
        left = self._has_sound.copy()
        left[: _frame(within.start)] = False
        left[_frame(within.end) :] = False
        for start, end in covered:
            left[max(0, _frame(start - _NEAR_S)) : _frame(end + _NEAR_S)] = False
        found = [Span(start, min(end, self.seconds)) for start, end in _runs(left)]
        return [span for span in found if span.seconds >= _SHORTEST_SOUND_S]

    def parts(self, most_s: float, overlap_s: float) -> list[SoundPart]:
        """Return the chunks of the recording. The sound that the model gets for a chunk is at most ``most_s`` seconds
        long.

        A chunk ends in the middle of the longest silence in its second half or, if there is none, at the quietest
        moment there. The sound of a chunk extends by ``overlap_s`` into each neighbor, but not beyond the silence
        between them.
        """
        cuts, silences = [0.0], [Span(0.0, 0.0)]
        while self.seconds - max(0.0, cuts[-1] - overlap_s) > most_s:
            # A chunk is heard from overlap_s before its start to overlap_s after its end.
            latest = cuts[-1] + most_s - (2 if len(cuts) > 1 else 1) * overlap_s
            silence = self._silence(cuts[-1] + most_s / 2, latest)
            cuts.append((silence.start + silence.end) / 2)
            silences.append(silence)
        cuts.append(self.seconds)
        silences.append(Span(self.seconds, self.seconds))
        return [
            SoundPart(
                Span(*own),
                self._heard(own, around, overlap_s),
                not around[1].seconds and own[1] < self.seconds,
            )
            for own, around in zip(pairwise(cuts), pairwise(silences), strict=True)
        ]

    def _heard(self, own: tuple[float, float], around: tuple[Span, Span], overlap_s: float) -> Span:
        before, behind = around
        start = max(own[0] - overlap_s, before.start if before.seconds else 0.0)
        end = min(own[1] + overlap_s, behind.end if behind.seconds else self.seconds)
        return Span(start, end)

    def _silence(self, earliest: float, latest: float) -> Span:
        """Return the longest silence between the times ``earliest`` and ``latest``; the last one if several are equally
        long.

        Without a silence of at least 0.1 s, return an empty span at the quietest moment.
        """
        first, last = _frame(earliest), max(_frame(earliest) + 1, _frame(latest))
        found = _runs(~self._has_sound[first:last])
        silence = max(found, key=lambda run: (run.seconds, run.start), default=Span(0, 0))
        if silence.seconds >= _SHORTEST_PAUSE_S:
            return Span(silence.start + first * FRAME_S, silence.end + first * FRAME_S)
        at = (first + int(np.argmin(self._db[first:last])) + 0.5) * FRAME_S
        return Span(at, at)


def _loudness(audio: Audio) -> NDArray[np.float64]:
    """Return the loudness of each frame in dB of full scale; the last frame may be shorter."""
    size = max(1, round(audio.sample_rate * FRAME_S))
    starts = np.arange(0, len(audio.samples), size)
    if not len(starts):
        return np.zeros(0)
    power = np.add.reduceat(np.square(audio.samples, dtype=np.float64), starts)
    lengths = np.minimum(size, len(audio.samples) - starts)
    return np.asarray(10 * np.log10(np.maximum(power / lengths, 1e-12)))


def _threshold(db: NDArray[np.float64], share: float) -> float:
    if not len(db):
        return _FLOOR_DB
    noise, loud = np.percentile(db, [10, 95])
    between = noise + share * (loud - noise)
    return float(max(_FLOOR_DB, min(between, loud - _UNDER_LOUD_DB)))


def _runs(marked: NDArray[np.bool_]) -> Sequence[Span]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marked, [False]]).astype(np.int8)))
    return [
        Span(a * FRAME_S, b * FRAME_S)
        for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]


def _frame(seconds: float) -> int:
    return max(0, round(seconds / FRAME_S))
