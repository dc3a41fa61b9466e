"""Named entities: the label scores of a text's tokens become spans of the text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from batchkit.types import Entity

if TYPE_CHECKING:
    import numpy as np

OUTSIDE = "O"
_PREFIXED = re.compile(r"([BIMLUES])-(.+)", re.DOTALL)
_BEGINS, _ENDS = ("B", "U", "S"), ("L", "E", "U", "S")  # BILOU and BIOES


class Tag(NamedTuple):
    """A label without its prefix, and whether the prefix says that an entity begins or ends with this token."""

    label: str
    begins: bool = False
    ends: bool = False


class Token(NamedTuple):
    """A token that is in an entity: its tag and its score, and its place in the text."""

    tag: Tag
    score: float
    start: int
    end: int


def tags_of(labels: Mapping[int, str], count: int) -> list[Tag]:
    """The tags of a model's ``count`` labels, in their order; one without a name is ``LABEL_n``, as in transformers.

    A letter and a hyphen are a prefix only if the label after them also has B- or I-, so ``E-MAIL`` stays whole.
    """
    names = [labels.get(n, f"LABEL_{n}") for n in range(count)]
    parts = [_PREFIXED.fullmatch(name) for name in names]
    kinds = {found[2] for found in parts if found is not None and found[1] in ("B", "I")}
    return [
        Tag(found[2], found[1] in _BEGINS, found[1] in _ENDS)
        if found is not None and found[2] in kinds
        else Tag(name)
        for name, found in zip(names, parts, strict=True)
    ]


def entities_in(
    text: str,
    places: Sequence[tuple[int, int] | None],
    scores: np.ndarray[Any, Any],
    tags: Sequence[Tag],
) -> list[Entity]:
    """The entities of ``text``, in its order.

    ``places``: where each token is in ``text``; None for a special token. ``scores``: a line for each token, with a
    number for each tag. The likeliest tag of a token counts. Tokens that follow each other with the same label are one
    entity, unless their prefixes say otherwise; its score is the mean of theirs.
    """
    spans = list[list[Token]]()
    previous: Token | None = None
    for token in _tokens(places, scores, tags):
        if token is not None:
            if previous is None or not _continues(previous.tag, token.tag):
                spans.append([])
            spans[-1].append(token)
        previous = token
    found = (_entity(text, span) for span in spans)
    return [entity for entity in found if entity["text"]]


def _tokens(
    places: Sequence[tuple[int, int] | None],
    scores: np.ndarray[Any, Any],
    tags: Sequence[Tag],
) -> Iterator[Token | None]:
    """None for a token that is outside of all entities."""
    likeliest, best = scores.argmax(axis=1).tolist(), scores.max(axis=1).tolist()
    for place, number, score in zip(places, likeliest, best, strict=True):
        if place is None or tags[number].label == OUTSIDE:
            yield None
        elif place[0] < place[1]:  # else it has none of the text
            yield Token(tags[number], score, *place)


def _continues(previous: Tag, tag: Tag) -> bool:
    return previous.label == tag.label and not (previous.ends or tag.begins)


def _entity(text: str, span: Sequence[Token]) -> Entity:
    """Without the space before it, which many tokenizers make part of a token."""
    start, end = span[0].start, span[-1].end
    whole = text[start:end]
    start += len(whole) - len(whole.lstrip())
    word = whole.strip()
    score = sum(token.score for token in span) / len(span)
    return Entity(
        label=span[0].tag.label, text=word, start=start, end=start + len(word), score=score
    )
