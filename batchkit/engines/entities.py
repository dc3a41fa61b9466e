"""Named entities: converts the label scores of tokens to entities, which are spans of the text."""

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
    """A label without its prefix (``B-``, ``I-``, …), and whether the prefix marks the begin or the end of an
    entity."""

    label: str
    begins: bool = False
    ends: bool = False


class TaggedToken(NamedTuple):
    """A token inside an entity: its tag, score and position in the text."""

    tag: Tag
    score: float
    start: int
    end: int


def tags_of(labels: Mapping[int, str], count: int) -> list[Tag]:
    """Return the tags of a model's ``count`` labels, in order. A missing label is called ``LABEL_n``, as in
    transformers.

    A letter with a hyphen counts as a prefix only if the same label also occurs with ``B-`` or ``I-``. So ``E-MAIL`` is
    a label, not an end of ``MAIL``.
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
    """Return the entities of ``text``, in order.

    Each token gets the tag with its highest score. Adjacent tokens with the same label form one entity, unless their
    prefixes mark a new one. An entity's score is the mean over its tokens.

    - ``places``: each token's start and end in ``text``; None for a special token.
    - ``scores``: one row per token, one column per tag.
    """
    spans = list[list[TaggedToken]]()
    previous: TaggedToken | None = None
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
) -> Iterator[TaggedToken | None]:
    """Yield a TaggedToken for each token that is part of an entity, and None for each other token.

    Tokens that cover no text are left out.
    """
    likeliest, best = scores.argmax(axis=1).tolist(), scores.max(axis=1).tolist()
    for place, number, score in zip(places, likeliest, best, strict=True):
        if place is None or tags[number].label == OUTSIDE:
            yield None
        elif place[0] < place[1]:  # otherwise the token covers no text
            yield TaggedToken(tags[number], score, *place)


def _continues(previous: Tag, tag: Tag) -> bool:
    return previous.label == tag.label and not (previous.ends or tag.begins)


def _entity(text: str, span: Sequence[TaggedToken]) -> Entity:
    """Return the entity that consists of the tokens ``span``.

    Remove a space at its beginning, because many tokenizers include the space before a word in the word's first token.
    """
    start, end = span[0].start, span[-1].end
    whole = text[start:end]
    start += len(whole) - len(whole.lstrip())
    word = whole.strip()
    score = sum(token.score for token in span) / len(span)
    return Entity(
        label=span[0].tag.label, text=word, start=start, end=start + len(word), score=score
    )
