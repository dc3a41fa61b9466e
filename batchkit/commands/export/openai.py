"""Output files of OpenAI's Batch API: https://platform.openai.com/docs/guides/batch.

The body of a generated answer is a ``chat.completion`` as the ``openai`` package reads it, or the response of the
endpoint that the row's batch line names. Embeddings have OpenAI's format; other pooling tasks have the formats of
``vllm run-batch``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchkit.commands.export.outputs import Export, exporting
from batchkit.commands.export.responses import response_of, tokens_of
from batchkit.config.tables import JobConfig
from batchkit.rendering.body import sides_of
from batchkit.runs.inputs import with_fields
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.log import RESULTS
from batchkit.storage.manifest import read_manifest
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.schema import LEAST_LOGPROB
from batchkit.storage.score_store import read_scored
from batchkit.storage.vectors import Vectors

_FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "function_call")
# Finish reasons of vLLM and other servers.
_CUT_OFF = ("abort", "error", "max_tokens", "repetition")
_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


class BatchResponse(NamedTuple):
    """The part of a response body that depends on the task. ``kind``: the prefix of the body's id, for example
    ``chatcmpl``. ``parts``: the other fields that depend on the task."""

    kind: str
    parts: Mapping[str, Any]


def write_openai(folder: Path, path: Path) -> dict[Path, int]:
    """Write a file of answers to ``path``, and a file of errors beside it.

    Raises:
        InputError: Answers of ``/v1/rerank`` repeat the documents of their batch lines, but the input file is gone.
        StoreError: A vector is missing or damaged.
    """
    job, vectors = job_of_run(folder), Vectors(folder)
    model = str(read_manifest(folder).model.name or "")
    errors = path.with_name(f"{path.stem}.errors{path.suffix}")
    names = {"body"} if _needs_lines(folder, job) else set()
    n_answers = n_errors = 0
    with (
        exporting(path, folder) as answers_path,
        exporting(errors, folder) as errors_path,
        answers_path.open("wb") as answers_file,
        errors_path.open("wb") as errors_file,
    ):
        for record, fields in with_fields(read_scored(folder), job, names):
            if record["status"] == "ok":
                answer = _answer_of(record, fields, vectors)
                line = _answer_line(record, answer, record.get("lora") or model)
                answers_file.write(orjson.dumps(line, option=_OPTIONS))
                n_answers += 1
            else:
                error = record["error"]
                line = error_line(record["index"], record["id"], error["kind"], error["message"])
                errors_file.write(orjson.dumps(line, option=_OPTIONS))
                n_errors += 1
    return {path: n_answers, errors: n_errors}


OPENAI = Export(write_openai, "results.openai.jsonl")


def _needs_lines(folder: Path, job: JobConfig) -> bool:
    """Return True if some answers must repeat documents of their batch lines (``/v1/rerank``), so that the input is
    needed."""
    if job.task == "generate" or not job.may_have_lines:
        return False
    return any(record.get("endpoint") == "rerank" for record in read_newest(folder / RESULTS))


def _answer_of(
    record: Mapping[str, Any], line: Mapping[str, Any], vectors: Vectors
) -> BatchResponse:
    """Return a record's answer in the format of its task and endpoint.

    ``line``: has the ``body`` of the row's batch line if ``_needs_lines``; otherwise it is empty.
    """
    if (place := record.get("embedding")) is not None:
        return _vector(record, vectors) if place.get("tokens") is None else _matrix(record, vectors)
    if record.get("probabilities") is not None:
        return _classes(record)
    if record.get("score") is not None:
        return _ranked(record, line) if record.get("endpoint") == "rerank" else _scores(record)
    of_endpoint = {
        "responses": _response,
        "completions": _text,
        "audio/transcriptions": _transcription,
    }
    return of_endpoint.get(record.get("endpoint") or "", _chat)(record)


def _answer_line(record: Mapping[str, Any], answer: BatchResponse, model: str) -> dict[str, Any]:
    index, of_time = record["index"], {"created": _created(record)}
    if answer.kind == "resp":
        of_time = {"created_at": of_time["created"]}
    return {
        "id": f"batch_req_{index}",
        "custom_id": record["id"],
        "response": {
            "status_code": 200,
            "request_id": f"req_{index}",
            "body": {"id": f"{answer.kind}-{index}", **of_time, "model": model, **answer.parts},
        },
        "error": None,
    }


def error_line(index: int, custom_id: str, code: str, message: str) -> dict[str, Any]:
    return {
        "id": f"batch_req_{index}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }


def _chat(record: Mapping[str, Any]) -> BatchResponse:
    choices = [_choice(number, choice) for number, choice in enumerate(_choices_in(record))]
    usage = _usage(tokens_of(record))
    return BatchResponse(
        "chatcmpl", {"object": "chat.completion", "choices": choices, "usage": usage}
    )


def _text(record: Mapping[str, Any]) -> BatchResponse:
    """Return the response of ``/v1/completions``."""
    choices = [
        {
            "index": number,
            "text": choice.get("text") or "",
            "logprobs": _columns(choice.get("logprobs")),
            **_finish(choice),
        }
        for number, choice in enumerate(_choices_in(record))
    ]
    usage = _usage(tokens_of(record))
    return BatchResponse("cmpl", {"object": "text_completion", "choices": choices, "usage": usage})


def _choices_in(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the choices of a record: all of them, or only the one that ``[select]`` selected."""
    kept, selected = record.get("choices") or [record], record.get("selected")
    return [kept[selected]] if selected is not None and len(kept) > 1 else kept


def _response(record: Mapping[str, Any]) -> BatchResponse:
    return BatchResponse("resp", response_of(record, _choices_in(record)[0]))


def _transcription(record: Mapping[str, Any]) -> BatchResponse:
    """Return a transcript in OpenAI's ``json`` format, with the fields of ``verbose_json`` that are known."""
    segments = [{"id": n, **segment} for n, segment in enumerate(record.get("segments") or ())]
    seconds = record["seconds"]
    usage = {"type": "duration", "seconds": seconds}
    parts = {"text": record["text"], "duration": seconds, "segments": segments, "usage": usage}
    return BatchResponse("transcription", parts)


def _created(record: Mapping[str, Any]) -> int:
    return int(datetime.fromisoformat(record["finished_at"]).timestamp())


def _choice(number: int, choice: Mapping[str, Any]) -> dict[str, Any]:
    tokens = choice.get("logprobs")
    return {
        "index": number,
        "message": _message(choice),
        "logprobs": None
        if tokens is None
        else {"content": [_token(token) for token in tokens], "refusal": None},
        **_finish(choice),
    }


def _finish(choice: Mapping[str, Any]) -> dict[str, Any]:
    reason = choice.get("finish_reason")
    if reason in _FINISH_REASONS:
        return {"finish_reason": reason}
    # OpenAI's clients reject other values. OpenRouter uses this name for the original value.
    known = "length" if reason in _CUT_OFF else "stop"
    return {"finish_reason": known, "native_finish_reason": reason}


def _columns(tokens: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """Return logprobs in the format of ``/v1/completions``: one list per field, with one entry per token."""
    if tokens is None:
        return None
    made = [_token(token) for token in tokens]
    return {
        "tokens": [token["token"] for token in made],
        "token_logprobs": [token["logprob"] for token in made],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in token["top_logprobs"]} for token in made
        ],
    }


def _message(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice as a message in the format of vLLM's server, with the reasoning in ``reasoning``.

    The content is null if there are tool calls and no text.
    """
    text, calls = choice.get("text"), choice.get("tool_calls")
    message = {"role": "assistant", "content": (text or None) if calls else text, "refusal": None}
    if calls:  # OpenAI's clients reject a call without an id, and some servers send none
        message["tool_calls"] = [
            {**call, "id": call.get("id") or f"call_{n}"} for n, call in enumerate(calls)
        ]
    if reasoning := choice.get("reasoning"):
        message["reasoning"] = reasoning
    return message


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    others = [_token_logprob(other) for other in token.get("top_logprobs", ())]
    return {**_token_logprob(token), "top_logprobs": others}


def _token_logprob(token: Mapping[str, Any]) -> dict[str, Any]:
    """Return a token of the logprobs in OpenAI's format. A null logprob in the log means -inf, which JSON can't
    store."""
    logprob = token["logprob"]
    return {
        "token": token["token"] or "",
        "bytes": None,  # the log does not have them, and a token may be part of a character
        "logprob": LEAST_LOGPROB if logprob is None else logprob,
    }


def _usage(usage: Mapping[str, int] | None) -> dict[str, Any] | None:
    if not usage:
        return None
    found: dict[str, Any] = {**usage}
    found["total_tokens"] = found["prompt_tokens"] + found["completion_tokens"]
    if (tokens := found.pop("reasoning_tokens", None)) is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": tokens}
    if (tokens := found.pop("cached_tokens", None)) is not None:
        found["prompt_tokens_details"] = {"cached_tokens": tokens}
    return found


def _vector(record: Mapping[str, Any], vectors: Vectors) -> BatchResponse:
    vector = {"index": 0, "object": "embedding", "embedding": vectors.of(record)}
    return _listed("embd", record, [vector])


def _matrix(record: Mapping[str, Any], vectors: Vectors) -> BatchResponse:
    """Return one vector per token in the format of ``/pooling`` of ``vllm serve``."""
    found = {"index": 0, "object": "pooling", "data": vectors.of(record)}
    return _listed("pool", record, [found])


def _classes(record: Mapping[str, Any]) -> BatchResponse:
    found = {
        "index": 0,
        "label": record.get("label"),
        "probs": record["probabilities"],
        "num_classes": len(record["probabilities"]),
    }
    return _listed("classify", record, [found])


def _scores(record: Mapping[str, Any]) -> BatchResponse:
    data = [
        {"index": n, "object": "score", "score": score}
        for n, score in enumerate(_scores_in(record))
    ]
    return _listed("score", record, data)


def _ranked(record: Mapping[str, Any], line: Mapping[str, Any]) -> BatchResponse:
    scores = _scores_in(record)
    body = line["body"]
    documents = sides_of(body).documents
    top_n = body.get("top_n")
    most = top_n if isinstance(top_n, int) and top_n > 0 else len(documents)
    best_first = (record.get("order") or [0])[:most]
    results = [
        {"index": n, "document": _document(documents[n]), "relevance_score": scores[n]}
        for n in best_first
    ]
    return BatchResponse("rerank", {"results": results, "usage": _pooled_usage(record)})


def _scores_in(record: Mapping[str, Any]) -> list[float]:
    found = record["score"]
    return found if isinstance(found, list) else [found]


def _document(content: Any) -> dict[str, Any]:
    is_text = isinstance(content, str)
    return {"text": content if is_text else None, "multi_modal": None if is_text else content}


def _listed(kind: str, record: Mapping[str, Any], data: list[dict[str, Any]]) -> BatchResponse:
    return BatchResponse(kind, {"object": "list", "data": data, "usage": _pooled_usage(record)})


def _pooled_usage(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the token usage of a pooling task. It is always present, because OpenAI's clients reject an embedding
    without it."""
    tokens = (record.get("usage") or {}).get("prompt_tokens", 0)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
