"""``/metrics`` for Prometheus: what the caller's key has."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from batchkit.serve.batch import UNFINISHED
from batchkit.serve.live import live
from batchkit.serve.settings import Settings
from batchkit.serve.store import Store


def metric_routes(settings: Settings, store: Store) -> APIRouter:
    routes = APIRouter()

    @routes.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

        owner, registry = request.state.owner, CollectorRegistry()
        states = Gauge("batchkit_batches", "Batches by state", ["status"], registry=registry)
        rows = Gauge(
            "batchkit_batch_rows",
            "Rows of batches that have not ended",
            ["state"],
            registry=registry,
        )
        files = Gauge("batchkit_file_bytes", "Bytes of files", registry=registry)
        for (kind, status), n in store.counts(owner).items():
            if kind == "batch":
                states.labels(status).set(n)
        for stored in store.all("batch", *UNFINISHED, owner=owner):
            counts = live(stored.doc, settings)["request_counts"]
            left = counts["total"] - counts["completed"] - counts["failed"]
            for state, n in {**counts, "left": left}.items():
                if state != "total":
                    rows.labels(state).inc(n)
        files.set(store.bytes_of(owner))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes
