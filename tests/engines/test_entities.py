"""Label scores of tokens become entities, with the prefixes of each labelling scheme."""

from __future__ import annotations

import numpy as np
import pytest

from batchkit.engines.entities import entities_in, tags_of

TEXT = "ada king met bob"
THREE = [("PER", "ada king"), ("PER", "met"), ("PER", "bob")]
PLACES = [(0, 3), (4, 8), (9, 12), (13, 16)]


def found(labels: list[str], others: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """The entities of TEXT, if its four words have these labels."""
    names = list(dict.fromkeys([*labels, *others]))
    scores = np.full((len(labels), len(names)), 0.1, "f4")
    for token, label in enumerate(labels):
        scores[token, names.index(label)] = 0.9
    entities = entities_in(TEXT, PLACES, scores, tags_of(dict(enumerate(names)), len(names)))
    for entity in entities:
        assert TEXT[entity["start"] : entity["end"]] == entity["text"]
        assert entity["score"] == pytest.approx(0.9)
    return [(entity["label"], entity["text"]) for entity in entities]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["B-PER", "I-PER", "O", "B-PER"], [("PER", "ada king"), ("PER", "bob")]),
        (["B-PER", "B-PER", "I-PER", "O"], [("PER", "ada"), ("PER", "king met")]),
        (["I-PER", "I-PER", "I-LOC", "O"], [("PER", "ada king"), ("LOC", "met")]),
        (["B-PER", "I-LOC", "I-LOC", "O"], [("PER", "ada"), ("LOC", "king met")]),
        (["B-PER", "L-PER", "I-PER", "U-PER"], THREE),
        (["B-PER", "E-PER", "S-PER", "S-PER"], THREE),
        (["B-PER", "M-PER", "E-PER", "O"], [("PER", "ada king met")]),
        (["PER", "PER", "O", "LOC"], [("PER", "ada king"), ("LOC", "bob")]),
        (["E-MAIL", "E-MAIL", "O", "B-PER"], [("E-MAIL", "ada king"), ("PER", "bob")]),
        (["B-A-B", "I-A-B", "O", "O"], [("A-B", "ada king")]),
        (["O", "O", "O", "O"], []),
    ],
)
def test_prefixes_say_where_an_entity_begins_and_ends(
    labels: list[str], expected: list[tuple[str, str]]
) -> None:
    assert found(labels) == expected


def test_a_special_token_has_no_place_and_ends_an_entity() -> None:
    scores = np.array([[0.0, 0.6], [0.0, 0.9], [0.0, 0.8], [0.0, 0.7]], "f4")
    places = [(0, 3), None, (9, 12), (12, 16)]
    one, two = entities_in(TEXT, places, scores, tags_of({0: "O"}, 2))
    assert (one["text"], one["label"]) == ("ada", "LABEL_1")
    assert (two["text"], two["start"], two["score"]) == ("met bob", 9, pytest.approx(0.75))


def test_spaces_that_a_token_has_are_not_part_of_an_entity() -> None:
    scores = np.array([[1.0], [1.0], [0.5], [0.5]], "f4")
    places = [(3, 8), (8, 8), (8, 9), (9, 13)]
    (one,) = entities_in(TEXT, places, scores, tags_of({}, 1))
    assert (one["text"], one["start"], one["end"]) == ("king met", 4, 12)
    assert entities_in(TEXT, [(3, 4)], scores[:1], tags_of({}, 1)) == []
