"""The answers of a run in the shapes of ``vllm run-batch``'s output, by task; a vector's is OpenAI's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from batchkit.commands.export.openai_lines import Answer, chat
from batchkit.rendering.body import sides_of
from batchkit.runs.inputs import with_fields
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.vectors import Vectors


def answers(
    records: Iterable[dict[str, Any]], folder: Path
) -> Iterator[tuple[dict[str, Any], Answer | None]]:
    """Each record of the run in ``folder`` with its answer; None for a failed one.

    Raises:
        InputError: the scores are those of a batch file, whose lines say which shape they have, and it
            is gone.
        StoreError: a vector is missing or damaged.
    """
    job, vectors = job_of_run(folder), Vectors(folder)
    if job.task == "score" and not job.pair.is_set:
        for record, fields in with_fields(records, job, {"url", "body"}):
            yield record, _scores(record, fields) if record["status"] == "ok" else None
        return
    for record in records:
        if record["status"] != "ok":
            yield record, None
        elif job.task == "embed":
            vector = {"index": 0, "object": "embedding", "embedding": vectors.of(record)}
            yield record, _listed("embd", record, [vector])
        elif job.task == "classify":
            yield record, _classes(record)
        elif job.task == "score":
            yield record, _scores(record, {})
        else:
            yield record, chat(record)


def _listed(kind: str, record: Mapping[str, Any], data: list[dict[str, Any]]) -> Answer:
    return Answer(kind, {"object": "list", "data": data, "usage": _usage(record)})


def _classes(record: Mapping[str, Any]) -> Answer:
    found = {
        "index": 0,
        "label": record.get("label"),
        "probs": record["probabilities"],
        "num_classes": len(record["probabilities"]),
    }
    return _listed("classify", record, [found])


def _scores(record: Mapping[str, Any], line: Mapping[str, Any]) -> Answer:
    """``line`` is the row's line of a batch file, or empty."""
    scores = record["score"] if isinstance(record["score"], list) else [record["score"]]
    if not str(line.get("url")).rstrip("/").endswith("/rerank"):
        data = [{"index": n, "object": "score", "score": score} for n, score in enumerate(scores)]
        return _listed("score", record, data)
    body = line["body"]
    documents = sides_of(body).documents
    top_n = body.get("top_n")
    most = top_n if isinstance(top_n, int) and top_n > 0 else len(documents)
    best_first = (record.get("order") or [0])[:most]
    results = [
        {"index": n, "document": _document(documents[n]), "relevance_score": scores[n]}
        for n in best_first
    ]
    return Answer("rerank", {"results": results, "usage": _usage(record)})


def _document(content: Any) -> dict[str, Any]:
    is_text = isinstance(content, str)
    return {"text": content if is_text else None, "multi_modal": None if is_text else content}


def _usage(record: Mapping[str, Any]) -> dict[str, int]:
    """OpenAI's clients refuse an embedding without it."""
    tokens = (record.get("usage") or {}).get("prompt_tokens", 0)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
