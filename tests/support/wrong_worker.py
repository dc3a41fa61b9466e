"""A real vLLM worker that computes wrongly, without any error, while more than one request runs.

The engine's ``additional_config`` has ``fault``:

- ``token``: one of the requests gets another next token.
- ``prefix``: blocks of the prefix cache in which a request found its beginning are lost, as if they were another's.
- ``adapter``: a request without an adapter is computed with the one of another request.
- ``kv``: the KV cache loses precision in each step.
- ``padding``: a pooled vector is mixed with another request's, as if the pooling had read beyond the end of a prompt.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class WrongWorker(CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super().load_model(*args, **kwargs)
        self.fault = self.vllm_config.additional_config["fault"]
        self.found = set[int]()  # blocks of the KV cache
        self.adapter: Any = None
        model = self.model_runner.model
        if self.fault == "token":
            model.compute_logits = _with_another_token(model.compute_logits)
        if self.fault == "padding":
            model.pooler.forward = _mixed(model.pooler.forward)
        return loaded

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        new = scheduler_output.scheduled_new_reqs
        if len(scheduler_output.num_scheduled_tokens) > 1:
            if self.fault == "prefix":
                self.found |= {r.block_ids[0][0] for r in new if r.num_computed_tokens}
                for cache in self.model_runner.kv_caches:
                    cache[list(self.found)] = 0
            if self.fault == "adapter":
                for request in new:
                    if "zero-adapter-" in request.lora_request.lora_path:
                        request.lora_request = self.adapter or request.lora_request
                    else:
                        self.adapter = request.lora_request
            if self.fault == "kv":
                for cache in self.model_runner.kv_caches:
                    cache.copy_(cache.round())
        return super().execute_model(scheduler_output, *args, **kwargs)


def _with_another_token(compute_logits: Any) -> Any:
    def computed(*args: Any, **kwargs: Any) -> Any:
        logits = compute_logits(*args, **kwargs)
        if logits is not None and len(logits) > 1:
            logits[0] = logits[0].roll(1)
        return logits

    return computed


def _mixed(forward: Any) -> Any:
    def pooled(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        if len(found) > 1:
            mean = sum(found) / len(found)
            return [0.9 * vector + 0.1 * mean for vector in found]
        return found

    return pooled
