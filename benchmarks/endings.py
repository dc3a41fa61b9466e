"""A vLLM worker in which answers of random weights end by a stop token, at lengths that nobody knows.

    worker_cls = "endings.Worker"
    additional_config = { median_tokens = 60 }

A length is lognormal, as in accelerator.py, and drawn from a hash of the prompt's tokens, so that it
is the same on all sides however bfloat16 rounds. The worker forbids stop tokens until then and makes
them certain from then on, by vLLM's own ``min_tokens`` and ``logit_bias``. It sets them in its own
copy of the request's sampling parameters, so the scheduler does not know the length.

A custom logits processor would change vLLM's default: earlier versions leave model runner V2 for V1
then, and V2 in 0.32 refuses processors of V1's interface. Both runners have what is used here. In V1
it costs the host 0.01 ms a step with 256 requests, 0.2 ms if one of them is new; in V2 a kernel.
"""

from __future__ import annotations

from copy import copy
from typing import Any
from zlib import crc32

import numpy as np
from hungry import PlatformWorker

SIGMA = 0.9  # as in accelerator.py
CERTAIN = 100.0  # logits of random weights are below 10


class Worker(PlatformWorker):
    def execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        median_tokens = self.vllm_config.additional_config["median_tokens"]
        for new in scheduled.scheduled_new_reqs:
            params = new.sampling_params = copy(new.sampling_params)
            draw = np.random.default_rng(crc32(np.array(new.prompt_token_ids).tobytes()))
            length = round(draw.lognormal(np.log(median_tokens), SIGMA))
            params.min_tokens = min(max(length, 1), params.max_tokens - 1)
            params.logit_bias = dict.fromkeys(params.all_stop_token_ids, CERTAIN)
        return super().execute_model(scheduled, *args, **kwargs)
