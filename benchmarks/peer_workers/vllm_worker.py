"""vLLM: offline, plain and with a draft model, one request at a time.

See https://docs.vllm.ai/en/latest/features/speculative_decoding/draft_model/. Written after that
page and not yet run.
"""

import os
from typing import Any

from benchmarks.peer_workers.protocol import SEED, Answer, Job, Ready, serve, watch


class VLLM:
    """A worker with one engine per row."""

    def __init__(self) -> None:
        self.engines: dict[str, Any] = {}
        self.temperature = 0.0

    def prepare(self, row: str, job: Job) -> Ready:
        self.temperature = job.temperature
        os.environ["OMP_NUM_THREADS"] = str(job.threads)  # before torch is imported
        import vllm

        extra: dict[str, Any] = {}
        if row == "speculative":
            extra["speculative_config"] = {
                "method": "draft_model",
                "model": job.draft,
                "num_speculative_tokens": job.num_speculative_tokens,
            }
        with watch() as spent:
            self.engines[row] = vllm.LLM(
                job.target,
                dtype=job.dtype,
                max_model_len=job.max_length,
                max_num_seqs=1,
                enable_prefix_caching=False,
                **extra,
            )
        return Ready(job.dtype, job.threads, f"vllm {vllm.__version__}", spent.seconds)

    def generate(self, row: str, prompt: list[int], num_tokens: int) -> Answer:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=self.temperature, seed=SEED, max_tokens=num_tokens, ignore_eos=True
        )
        with watch() as spent:
            (output,) = self.engines[row].generate(
                [{"prompt_token_ids": prompt}], sampling, use_tqdm=False
            )
        return Answer(list(output.outputs[0].token_ids), spent.seconds)

    def close(self) -> None:
        self.engines.clear()


if __name__ == "__main__":
    serve(VLLM())
