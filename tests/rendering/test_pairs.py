"""A row becomes the pair that ``task = "score"`` compares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.errors import PromptTooLongError, RequestError, TemplateError
from batchkit.execution.retry import with_smaller_media
from batchkit.rendering.templates.prompt import constant_files
from batchkit.types import Pair, Request, Row
from tests.support.dry_runs import job
from tests.support.rendering import refusal, render, renderer

TEXTS = {"query": "Q: {{ q }}", "documents": "{{ d }}"}


def of_pair(pair: dict[str, Any] = TEXTS, **tables: Any) -> dict[str, Any]:
    """The tables of a job."""
    return {"task": "score", "pair": pair, **tables}


def paired(fields: Mapping[str, Any], pair: dict[str, Any] = TEXTS, **tables: Any) -> Request:
    return render(fields, **of_pair(pair, **tables))


@pytest.mark.parametrize("documents", ["Tea is a drink.", ["one", "two"]])
def test_a_text_is_a_document_and_a_list_has_several(documents: Any) -> None:
    found = paired({"q": "tea?", "d": documents, "prompt": "not read"})
    is_list = isinstance(documents, list)
    assert found.pair == Pair("Q: tea?", documents if is_list else [documents], is_list=is_list)
    assert (found.messages, found.prompt) == (None, None)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ([], "pair.documents: found an empty list"),
        (["a", 7], "pair.documents: found ['a', 7], expected a text or a list of texts"),
        (7, "pair.documents: found 7, expected a text or a list of texts"),
        (None, "pair.documents: found None, expected a text or a list of texts"),
    ],
)
def test_documents_that_are_no_texts_fail_the_row(documents: Any, expected: str) -> None:
    assert expected in refusal(RequestError, {"q": "x", "d": documents}, **of_pair())


def test_a_row_without_a_field_of_the_pair_fails() -> None:
    message = refusal(TemplateError, {"q": "x"}, **of_pair())
    assert message.startswith("pair.documents: '{{ d }}' is undefined; the row has q")


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, Any]:
    for n in range(3):
        Image.new("RGB", (40 + n, 30)).save(tmp_path / f"{n}.png")
    return {"media": {"root": str(tmp_path)}}


def widths(content: Any) -> list[int]:
    return [part["image_pil"].width for part in content if part["type"] == "image_pil"]


def test_images_of_query_and_documents(pictures: dict[str, Any]) -> None:
    pair = {**TEXTS, "query_images": ["{{ a }}"], "document_images": ["{{ b }}"]}
    row = {"q": "x", "a": "0.png", "d": ["one", "two"], "b": ["1.png", "2.png"]}
    found = paired(row, pair, **pictures)
    assert widths(found.pair.query) == [40]
    assert [widths(document) for document in found.pair.documents] == [[41], [42]]
    assert found.media_bytes == 4 * 30 * (40 + 41 + 42)
    sources = renderer(**of_pair(pair), **pictures).sources(Row(0, "0", row))
    assert sources == [("image", f"{n}.png") for n in range(3)]


def test_each_document_needs_its_image(pictures: dict[str, Any]) -> None:
    pair = {**TEXTS, "document_images": ["{{ b }}"]}
    row = {"q": "x", "d": ["one", "two"], "b": "1.png"}
    message = refusal(RequestError, row, **of_pair(pair), **pictures)
    assert "document_images.0: found 1 images for 2 documents" in message


def test_a_row_that_ran_out_of_memory_gets_smaller_images(pictures: dict[str, Any]) -> None:
    pair = {**TEXTS, "query_images": ["{{ a }}"], "document_images": ["{{ b }}"]}
    row = {"q": "x", "a": "0.png", "d": ["one"], "b": "1.png"}
    smaller = with_smaller_media(paired(row, pair, **pictures)).pair
    assert (widths(smaller.query), widths(smaller.documents[0])) == ([28], [29])
    assert smaller.documents[0][-1] == {"type": "text", "text": "one"}


def test_an_image_of_all_rows_is_compared_at_the_next_start(pictures: dict[str, Any]) -> None:
    pair = {**TEXTS, "query_images": ["0.png"]}
    assert [*constant_files(job(**of_pair(pair), **pictures))] == ["pair.query_images.0"]


def test_the_longest_text_of_a_pair_is_cut() -> None:
    made = renderer(**of_pair(), retry={"on_too_long": "truncate-middle"})
    request = made.render(Row(0, "0", {"q": "short", "d": ["x", "word " * 200]}))
    error = PromptTooLongError("too long")
    error.prompt_tokens, error.max_model_len = 1000, 256
    shorter = made.shortened(request, error)
    query, (first, second) = shorter.pair.query, shorter.pair.documents
    assert (query, first) == ("Q: short", "x")
    assert 50 < len(second) < 300
    assert " […] " in second
