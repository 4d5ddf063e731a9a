"""OpenVINO GenAI: its pipeline with plain decoding, a draft model, or prompt lookup.

The pair is exported by ``optimum-cli export openvino`` in float32. It runs in the job's precision,
or in the one that the row's name ends in: `` f32``, `` f16`` or `` bf16``. The plugin is set to
compute, and to store keys and values, in that precision (its default for keys and values on a CPU
is 8 bit), without dynamic quantisation. If the CPU cannot compute in it, the worker raises an
error, since the plugin would silently use float32. Rows that end in `` int8`` have the target's
weights exported in 8 bits, and the plugin's defaults: keys and values of 8 bits, and dynamic
quantisation. Their draft is that of the job. Prefix caching is off, so every prompt is computed.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peer_workers.protocol import (
    INT8,
    KINDS,
    SEED,
    Answer,
    Job,
    Ready,
    export_path,
    serve,
    watch,
)

CACHE_GIGABYTES = 1
CAPABILITIES = {"f32": "FP32", "f16": "FP16", "bf16": "BF16"}
PROMPT_LOOKUP_NGRAM = 2  # transformers' default


@dataclass(frozen=True)
class Source:
    """Where a target is, and how OpenVINO runs it.

    Attributes:
        target: folder of the exported target.
        precision: of its weights.
        kind: OpenVINO's name of the precision in which it computes.
        properties: of the target.
    """

    target: Path
    precision: str
    kind: str
    properties: dict[str, Any]


class OpenVINO:
    """A worker with one pipeline per row."""

    def __init__(self) -> None:
        self.pipelines: dict[str, Any] = {}
        self.gamma, self.temperature = 0, 0.0

    def prepare(self, row: str, job: Job) -> Ready:
        self.gamma, self.temperature = job.num_speculative_tokens, job.temperature
        method = row.partition(" ")[0]
        with watch() as exported:
            source = source_of(row, job)
            draft = exported_model(job, job.draft) if method == "speculative" else None
        more: dict[str, Any] = {"scheduler_config": scheduler()}
        if draft is not None:
            own = whole_properties(job, source.kind)
            more["draft_model"] = genai.draft_model(str(draft), "CPU", **own)
        elif method == "prompt-lookup":
            more["prompt_lookup"] = True
        with watch() as spent:
            self.pipelines[row] = genai.LLMPipeline(
                str(source.target), "CPU", **source.properties, **more
            )
        return Ready(
            precision=source.precision,
            threads=job.threads,
            version=f"openvino-genai {genai.__version__}",
            seconds=spent.seconds,
            export_seconds=exported.seconds,
        )

    def generate(self, row: str, prompt: list[int], num_tokens: int) -> Answer:
        config = genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = self.temperature > 0
        if config.do_sample:
            config.temperature, config.rng_seed = self.temperature, SEED
        config.apply_chat_template = False
        method = row.partition(" ")[0]
        if method != "plain":
            config.num_assistant_tokens = self.gamma
        if method == "prompt-lookup":
            config.max_ngram_size = PROMPT_LOOKUP_NGRAM
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        with watch() as spent:
            result = self.pipelines[row].generate(ids, config)
        tokens = list(result.tokens[0])
        return Answer(tokens, spent.seconds, *(counts(result) if method != "plain" else ()))

    def close(self) -> None:
        self.pipelines.clear()


def source_of(row: str, job: Job) -> Source:
    """The target of a row, exported if it does not exist."""
    word = row.partition(" ")[2]
    kind = KINDS[job.dtype] if word in ("", INT8) else word
    require(kind)
    if word == INT8:
        return Source(exported_model(job, job.target, INT8), INT8, kind, defaults(job, kind))
    precision = next(dtype for dtype, name in KINDS.items() if name == kind)
    return Source(exported_model(job, job.target), precision, kind, whole_properties(job, kind))


def defaults(job: Job, kind: str) -> dict[str, Any]:
    """Properties of a model that runs as OpenVINO runs it, but for threads and arithmetic."""
    return {
        "INFERENCE_NUM_THREADS": job.threads,
        "INFERENCE_PRECISION_HINT": kind,
        "PERFORMANCE_HINT": "LATENCY",
    }


def whole_properties(job: Job, kind: str) -> dict[str, Any]:
    """Properties of a model that is in one precision as a whole."""
    whole = {"KV_CACHE_PRECISION": kind, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    return defaults(job, kind) | whole


def require(kind: str) -> None:
    """Raises ValueError if the processor does not compute in a precision."""
    supported = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if CAPABILITIES[kind] not in supported:
        raise ValueError(
            f"{kind}: this processor computes in {', '.join(supported)} under OpenVINO"
        )


def scheduler() -> Any:
    """A KV cache for one request, without prefix caching."""
    config = genai.SchedulerConfig()
    config.cache_size = CACHE_GIGABYTES
    config.max_num_seqs = 1
    config.enable_prefix_caching = False
    return config


def counts(result: Any) -> tuple[int | None, int]:
    """The numbers of drafted and of accepted tokens; None for the former if it is not reported.

    Accepted are all tokens beyond one per target step. The pipeline's own count of accepted tokens
    leaves out fully accepted drafts.
    """
    metrics = result.extended_perf_metrics
    drafted = None if metrics is None else metrics.get_num_draft_tokens()
    steps = len(result.perf_metrics.raw_metrics.m_batch_sizes)
    return drafted, len(result.tokens[0]) - steps


def exported_model(job: Job, model: str, weights: str = "fp32") -> Path:
    """The folder with the model's IR and tokenizer, exported if it does not exist."""
    path = export_path(job, model, "openvino" + f"-{weights}" * (weights != "fp32"))
    if not path.exists():
        unfinished = path.with_suffix(".part")
        # As a module, since the script names an interpreter that may have moved.
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        command += ["--model", model, "--task", "text-generation-with-past"]
        command += ["--weight-format", weights, str(unfinished)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            last = next(reversed(done.stderr.strip().splitlines()), "")
            raise RuntimeError(f"optimum-cli ended with {done.returncode}: {last}")
        unfinished.rename(path)
    return path


if __name__ == "__main__":
    serve(OpenVINO())
