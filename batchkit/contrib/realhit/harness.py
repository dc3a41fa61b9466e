"""The result files of RealHiTBench's harness. batchkit writes them, so that scripts for these files can read a run, and
reads predictions from them.

``results_<time>.json`` has ``config``, ``aggregate_metrics`` by question type, and ``results``. ``checkpoint.json`` in
the same folder has ``processed_ids`` and ``results``. As in the harness, F1 is a percentage, and ECR and Pass are
fractions of all scored rows of a question type. Failed rows are not in either file.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from batchkit import Run
from batchkit.commands.export.outputs import Export, exporting
from batchkit.contrib.realhit.final_answer import FAILED
from batchkit.runs.inputs import with_fields
from batchkit.scoring.metrics import OUT_OF_TEN, head

_FIELDS = {"FileName", "QuestionType", "SubQType", "Question", "FinalAnswer", "ProcessedAnswer"}
_YES_OR_NO = ("ECR", "Pass")
_PREDICTIONS = ("Prediction", "Model_Answer")
_ANSWERS = ("prediction", *_PREDICTIONS, "answer", "text", "response", "Response", "output")


def write_realhit(folder: Path, path: Path) -> dict[Path, int]:
    """Write the answered rows of the run in ``folder`` in the format of RealHiTBench's harness: to results_<time>.json,
    and to checkpoint.json beside it. Return the number of rows by file.

    ``path``: the results file if it ends in .json, otherwise the folder for both files.

    Raises:
        InputError: The records lack required fields, and the input no longer has them.
        StoreError: ``checkpoint.json`` would replace a run's own checkpoint.
    """
    if path.suffix != ".json":
        path.mkdir(parents=True, exist_ok=True)
        path = path / f"results_{time.strftime('%Y%m%d_%H%M%S')}.json"
    checkpoint = path.with_name("checkpoint.json")
    run, results, finished = Run(folder), [], []
    ok = (record for record in run.rows() if record["status"] == "ok")
    for record, fields in with_fields(ok, run.job(), _FIELDS):
        results.append(_result(record, fields))
        finished.append(record["finished_at"])
    content = {
        "config": _config(run, finished),
        "aggregate_metrics": _aggregate(results),
        "results": results,
    }
    ids = [result["id"] for result in results]
    done = {"processed_ids": ids, "results": results}
    with exporting(path, folder) as to_path, exporting(checkpoint, folder) as to_checkpoint:
        to_path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
        to_checkpoint.write_bytes(orjson.dumps(done, option=orjson.OPT_INDENT_2))
    return {path: len(results), checkpoint: len(ids)}


RESULTS = Export(write_realhit, "realhit")


def _result(record: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    is_chart = fields.get("QuestionType") == "Visualization"
    prediction = record.get("prediction")
    return {
        "id": _id(record["id"]),
        "FileName": fields.get("FileName"),
        "QuestionType": fields.get("QuestionType"),
        "SubQType": fields.get("SubQType"),
        "Question": fields.get("Question"),
        "Reference": fields.get("ProcessedAnswer" if is_chart else "FinalAnswer"),
        "Prediction": record["text"] if prediction is None else prediction,
        "Metrics": _metrics(record.get("scores") or {}),
        "ProcessingTime": round(record["latency_s"], 2),
    }


def _id(text: str) -> int | str:
    """Return a row's id as the harness writes it: an integer if the id is a plain number, otherwise the text."""
    is_number = text.isascii() and text.isdigit() and len(text) < 20 and str(int(text)) == text
    return int(text) if is_number else text


def _metrics(scores: Mapping[str, float | None]) -> dict[str, Any]:
    """Return a row's scores under the harness's names and in its scales. Unscored metrics are left out."""
    metrics: dict[str, Any] = {}
    for name, score in scores.items():
        called = "Pass" if name == "pass" else head(name)
        if score is not None and called in _YES_OR_NO:
            metrics[called] = bool(score)
        elif score is not None:
            metrics[called] = score if name in OUT_OF_TEN else round(score * 100, 10)
    return metrics


def _aggregate(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    by_type: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if result["Metrics"]:
            by_type.setdefault(str(result["QuestionType"]), []).append(result["Metrics"])
    return {
        kind: {
            name: sum(values) / (len(metrics) if name in _YES_OR_NO else len(values))
            for name in dict.fromkeys(name for metric in metrics for name in metric)
            if (values := [metric[name] for metric in metrics if name in metric])
        }
        for kind, metrics in by_type.items()
    }


def _config(run: Run, finished: Sequence[str]) -> dict[str, Any]:
    """Return the harness's ``config``. ``duration_seconds`` and ``throughput`` cover all starts whose duration is
    known. ``finished``: the time at which each row finished."""
    manifest, job = run.manifest(), run.job()
    starts, total = run.history().starts, len(finished)
    seconds = sum(start.seconds or 0.0 for start in starts)
    return {
        "model_dir": manifest.model.name,
        "modality": job.vars.get("modality"),
        "format": job.vars.get("format"),
        "data_path": job.media.root,
        "batch_size": job.run.max_in_flight,
        "total_queries": total,
        "start_time": starts[0].started_at if starts else None,
        "end_time": (starts[-1].ended_at or max(finished, default=None)) if starts else None,
        "duration_seconds": round(seconds, 3),
        "throughput": total / seconds if seconds else 0.0,
    }


def of_results(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry of the harness's results with the key ``prediction``. If its request failed, return the entry
    with the status "failed"."""
    answer = _first(entry, _ANSWERS)
    if isinstance(answer, str) and answer.lstrip().startswith(FAILED):
        return {**entry, "status": "failed"}
    if entry.get("prediction") is None and not entry.keys().isdisjoint(_PREDICTIONS):
        return {**entry, "prediction": _first(entry, _PREDICTIONS)}
    return entry


def _first(entry: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((entry[name] for name in names if entry.get(name) is not None), None)
