"""The pair of a row, for ``task = "score"``: a query, and the documents to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchkit.errors import RequestError
from batchkit.rendering.messages import text_part
from batchkit.rendering.templates.prompt import PromptTemplates, sources_of
from batchkit.sources.reader import shown
from batchkit.types import Content, Pair

MakePart = Callable[[str, Any], dict[str, Any]]


def pair_of(templates: PromptTemplates, names: Mapping[str, Any], part: MakePart) -> Pair:
    """Return the query and the documents of a row, rendered from the job's templates.

    - ``names``: the row's fields.
    - ``part``: makes a content part from the source of an image.

    Raises:
        RowError: a template can't be rendered, or the documents are not texts.
    """
    query = "" if templates.query is None else templates.query.text(names)
    sources = [
        source for made in templates.files.query_images for source in sources_of(made, names)
    ]
    texts, is_list = _documents(templates, names)
    images = _images_of_each(templates, names, len(texts) if is_list else None)
    documents = [_content(text, own, part) for text, own in zip(texts, images, strict=True)]
    return Pair(_content(query, sources, part), documents, is_list)


def _documents(templates: PromptTemplates, names: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the texts of the documents, and whether the row has a list of documents (instead of a single one)."""
    if templates.documents is None:
        return [""], False
    found = templates.documents.value(names)
    if isinstance(found, str):
        return [found], False
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        raise RequestError(
            f"pair.documents: found {shown(found)}, expected a text or a list of texts"
        )
    if not found:
        raise RequestError("pair.documents: found an empty list, expected at least one document")
    return list(found), True


def _images_of_each(
    templates: PromptTemplates, names: Mapping[str, Any], documents: int | None
) -> Sequence[Sequence[Any]]:
    """Return, for each document, the sources of its images.

    ``documents``: the number of documents; None if the row has a single document instead of a list.
    """
    given = [sources_of(template, names) for template in templates.files.document_images]
    if documents is None:
        return [[source for sources in given for source in sources]]
    for template, sources in zip(templates.files.document_images, given, strict=True):
        if len(sources) != documents:
            raise RequestError(
                f"{template.key}: found {len(sources)} images for {documents} documents; expected a"
                " list with one image for each"
            )
    return [[sources[n] for sources in given] for n in range(documents)]


def _content(text: str, sources: Sequence[Any], part: MakePart) -> Content:
    if not sources:
        return text
    return [*(part("image", source) for source in sources), *([text_part(text)] if text else [])]
