"""Prometheus endpoint for the newest metrics of a run (``run.metrics_port``).

Metric names are vLLM's where vLLM has one (``vllm:num_requests_running``), in Prometheus' base units. The labels
of ``batchkit_run_info`` are OpenTelemetry's for generative AI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import batchkit
from batchkit.config.masking import masked
from batchkit.config.tables import JobConfig
from batchkit.engines.registry import require
from batchkit.errors import JobError
from batchkit.storage.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

HOST = "127.0.0.1"
Show = Callable[[Metrics], None]


class Family(NamedTuple):
    """A metric family.

    - ``text``: the description for Prometheus.
    - ``field``: the field of Metrics, or of GpuLoad, that has the value.
    - ``label``: "gpu" or "status" if the family has one value per GPU or per row status, otherwise "".
    """

    text: str
    field: str
    label: str = ""

    def values(self, metrics: Metrics) -> Mapping[str, float | None]:
        """Return the metric's values, keyed by the value of its label ("" without a label)."""
        if self.label == "gpu":
            return {str(n): getattr(gpu, self.field) for n, gpu in enumerate(metrics.gpus)}
        if self.label == "status":
            return {"ok": metrics.rows_ok, "failed": metrics.rows_failed}
        return {"": getattr(metrics, self.field)}


# Names that end in _total are counters, by Prometheus' convention. Rows are gauges: a retry reduces failed rows.
FAMILIES = {
    "batchkit_rows": Family("Rows that have a record.", "", "status"),
    "batchkit_rows_expected": Family("Rows of the job.", "rows_total"),
    "batchkit_rows_retried_total": Family("Retries of rows in this start.", "retried"),
    "batchkit_run_seconds_total": Family("Run time of all starts.", "seconds"),
    "batchkit_prompt_tokens_total": Family("Tokens of answered prompts.", "prompt_tokens"),
    "batchkit_generation_tokens_total": Family("Tokens of answers.", "completion_tokens"),
    "batchkit_generations_total": Family("Generations of multi-generation rows.", "generations"),
    "batchkit_num_requests_in_flight": Family("Requests handed to the engines.", "in_flight"),
    "batchkit_num_requests_allowed": Family("Maximum requests in flight.", "window"),
    "batchkit_num_requests_running": Family("Requests that the engines run.", "running"),
    "batchkit_num_requests_waiting": Family("Requests in the engines' queues.", "waiting"),
    "batchkit_kv_cache_usage_ratio": Family("KV cache use; highest engine.", "kv_cache_usage"),
    "batchkit_num_preemptions_total": Family("Preemptions in this start.", "preemptions"),
    "batchkit_spec_decode_num_drafts_total": Family("Drafts in this start.", "drafts"),
    "batchkit_spec_decode_num_accepted_tokens_total": Family(
        "Accepted tokens of drafts in this start.", "accepted_tokens"
    ),
    "batchkit_engine_restarts_total": Family("Restarts of engines.", "engine_restarts"),
    "batchkit_host_memory_bytes": Family("Memory of the run's processes.", "host_bytes"),
    "batchkit_gpu_memory_bytes": Family("Memory in use on a GPU.", "memory_bytes", "gpu"),
    "batchkit_gpu_utilization_ratio": Family("Share of time in kernels.", "utilization", "gpu"),
}


@contextmanager
def exporting(job: JobConfig) -> Iterator[Show]:
    """Serve metrics at ``run.metrics_port`` inside the block. Yield a function that takes the newest metrics.

    Without ``run.metrics_port``, the function does nothing.

    Raises:
        JobError: the port is taken, or prometheus_client is not installed.
    """
    port = job.run.metrics_port
    if port is None:
        yield lambda metrics: None
        return
    require(["prometheus_client"], user="run.metrics_port", extra="metrics")
    from prometheus_client import CollectorRegistry, start_http_server

    newest = _Newest(job)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(newest)
    try:
        server, thread = start_http_server(port, addr=HOST, registry=registry)
    except OSError as error:
        raise JobError(
            f"run.metrics_port = {port}: can't listen on {HOST}: {error.strerror or error}; another run or"
            " program may use the port: choose another one (--set run.metrics_port=…)"
        ) from error
    try:
        yield newest.show
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Newest:
    """A collector for ``prometheus_client``. The run's thread replaces ``_metrics`` as a whole, while the
    server's threads read it.
    """

    def __init__(self, job: JobConfig) -> None:
        self._run = job.name
        self._info = {
            "version": batchkit.__version__,
            "gen_ai_operation_name": _operation(job),
            "gen_ai_request_model": str(masked(job.engine.model)),
            "engine": job.engine.kind,
        }
        self._metrics: Metrics | None = None

    def show(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield all families; only ``batchkit_run_info`` until the model is loaded."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        info = GaugeMetricFamily("batchkit_run_info", "What runs.", labels=["run", *self._info])
        info.add_metric([self._run, *self._info.values()], 1)
        yield info
        if (metrics := self._metrics) is None:
            return
        for name, family in FAMILIES.items():
            labels = ["run", family.label] if family.label else ["run"]
            made: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = made(name, family.text, labels=labels)
            for value_of_label, value in family.values(metrics).items():
                if value is not None:
                    metric.add_metric([self._run, value_of_label][: len(labels)], value)
            yield metric


def _operation(job: JobConfig) -> str:
    if job.generates:
        return "chat" if job.prompt.chat else "text_completion"
    # OpenTelemetry defines no operation for the other pooling tasks.
    return "embeddings" if job.task == "embed" else job.task
