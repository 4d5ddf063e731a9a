"""OpenVINO GenAI's continuous batching, with as many requests in flight as there are clients.

It has no HTTP server of its own, so the requests enter and leave its pipeline in this process, and
no token passes through a socket. Model, precision and cache are those of ``openvino_worker``.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peer_workers.openvino_worker import exported_model, require, scheduler
from benchmarks.peer_workers.protocol import KINDS, Batch, Job, Ready, serve, watch


class OpenVINOBatching:
    """A worker with one pipeline."""

    def __init__(self) -> None:
        self.pipeline: Any = None
        self.next_id = 0

    def prepare(self, row: str, job: Job) -> Ready:
        kind = KINDS[job.dtype]
        require(kind)
        with watch() as exported:
            target = exported_model(job, job.target)
        cache = scheduler()
        cache.max_num_seqs = int(row)  # most requests that run at the same time
        properties = {
            "INFERENCE_NUM_THREADS": job.threads,
            "INFERENCE_PRECISION_HINT": kind,
            "KV_CACHE_PRECISION": kind,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
        with watch() as spent:
            self.pipeline = genai.ContinuousBatchingPipeline(str(target), cache, "CPU", properties)
        return Ready(
            precision=job.dtype,
            threads=job.threads,
            version=f"openvino-genai {genai.__version__}",
            seconds=spent.seconds,
            export_seconds=exported.seconds,
        )

    def decode_all(self, prompts: Sequence[Sequence[int]], clients: int, num_tokens: int) -> Batch:
        config = genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        running: list[Any] = []
        waiting, num_done = deque(prompts), 0
        with watch() as spent:
            while waiting or running:
                while waiting and len(running) < clients:
                    ids = openvino.Tensor(np.array([waiting.popleft()], dtype=np.int64))
                    running.append(self.pipeline.add_request(self.next_id, ids, config))
                    self.next_id += 1
                self.pipeline.step()
                over = [each for each in running if not _goes_on(each)]
                num_done += sum(len(out.generated_ids) for each in over for out in each.read_all())
                running = [each for each in running if each not in over]
        if num_done != len(prompts) * num_tokens:
            raise RuntimeError(f"{num_done} tokens in place of {len(prompts) * num_tokens}")
        return Batch(spent.seconds)

    def close(self) -> None:
        self.pipeline = None


def _goes_on(handle: Any) -> bool:
    return bool(handle.get_status() == genai.GenerationStatus.RUNNING)


if __name__ == "__main__":
    serve(OpenVINOBatching())
