"""transformers: ``generate`` plain, assisted and with prompt lookup, eager and compiled.

Assisted generation uses the same γ as all peers: a constant number of assistant tokens, and no
confidence threshold. Compiled rows are what transformers offers on a CPU: for plain decoding, a
static cache and its own compiled step; for assisted generation, which does not accept a static
cache, ``torch.compile`` of both models with dynamic shapes.
"""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, CompileConfig

from benchmarks.peer_workers.protocol import SEED, Answer, Job, Ready, serve, watch


class Transformers:
    """A worker with the pair, eager and compiled."""

    def __init__(self) -> None:
        self.models: dict[tuple[str, bool], Any] = {}
        self.job: Job
        self.passes = 0

    def prepare(self, row: str, job: Job) -> Ready:
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(job.threads)
        self.job = job
        with watch() as spent:
            self._pair(row)
        return Ready(
            precision=job.dtype,
            threads=torch.get_num_threads(),
            version=f"transformers {transformers.__version__}, torch {torch.__version__}",
            seconds=spent.seconds,
        )

    def generate(self, row: str, prompt: list[int], num_tokens: int) -> Answer:
        target, draft = self._pair(row)
        method, _, compiled = row.partition(" ")
        extra: dict[str, Any] = {}
        if method == "assisted":
            config = draft.generation_config  # generate() overwrites these settings
            config.num_assistant_tokens = self.job.num_speculative_tokens
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            extra["assistant_model"] = draft
        elif method == "prompt-lookup":
            extra["prompt_lookup_num_tokens"] = self.job.num_speculative_tokens
        elif compiled:
            step: Any = CompileConfig(fullgraph=False, dynamic=False)
            step._compile_all_devices = True  # including CPUs
            extra |= {"cache_implementation": "static", "compile_config": step}
            extra["max_cache_len"] = self.job.max_length
        input_ids = torch.tensor([prompt])
        self.passes = 0
        with watch() as spent, torch.inference_mode():
            output = target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **self._sampling(),
                **extra,
            )
        tokens = output[0, len(prompt) :].tolist()
        accepted = None if method == "plain" else len(tokens) - self.passes
        return Answer(tokens, spent.seconds, accepted=accepted)

    def close(self) -> None:
        self.models.clear()

    def _sampling(self) -> dict[str, Any]:
        if not self.job.temperature:
            return {"do_sample": False}
        torch.manual_seed(SEED)
        return {"do_sample": True, "temperature": self.job.temperature, "top_k": 0, "top_p": 1.0}

    def _pair(self, row: str) -> tuple[Any, Any]:
        method, _, compiled = row.partition(" ")
        own = bool(compiled) and method != "plain"  # plain decoding compiles its own step
        draft = self._model(self.job.draft, own) if method == "assisted" else None
        return self._model(self.job.target, own), draft

    def _model(self, folder: str, compiled: bool) -> Any:
        if (folder, compiled) not in self.models:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, self.job.dtype)
            )
            if compiled:
                model.forward = torch.compile(model.forward, dynamic=True)
            if folder == self.job.target:
                model.register_forward_pre_hook(self._count)
            self.models[folder, compiled] = model
        return self.models[folder, compiled]

    def _count(self, *_: Any) -> None:
        self.passes += 1


if __name__ == "__main__":
    serve(Transformers())
