"""Cells of a benchmark as lines of cells.jsonl hold them, with made-up measurements."""

import math
import random
from typing import Any

import numpy as np

from outrider.lab.analysis.tokens_per_round import token_probabilities

ENVIRONMENT: dict[str, Any] = {
    "date": "2026-11-22",
    "hardware": "AMD EPYC",
    "threads": 2,
    "versions": {"outrider": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
    "host": "bench-1",
    "commit": "0123456789ab",
    "source": "feedc0de",
    "command": "outrider bench --plan plan.toml",
    "model": "target",
    "dtype": "bfloat16",
    "device": "cpu",
    "plan": {"methods": [{"method": "speculative", "label": ""}], "temperatures": [0.0]},
}
PLAIN, PASS, DRAFT, PREFILL = 0.021, 0.020, 0.002, 0.045
"""Seconds of a plain step, of its target pass, of a draft pass, and of the target's prefill."""


def stats(
    rounds: int, emitted: int, counts: dict[int, int], gamma: int, beta: float, prefill: float
) -> dict[str, Any]:
    """The statistics of a request: ``counts`` rounds by their number of accepted tokens."""
    accepted_at = [sum(m for n, m in counts.items() if n > i) for i in range(gamma)]
    tried_at = [sum(m for n, m in counts.items() if n >= i) for i in range(gamma)]
    return {
        "rounds": rounds,
        "drafted": rounds * gamma,
        "accepted": sum(accepted_at),
        "emitted": emitted,
        "accepted_at": accepted_at,
        "tried_at": tried_at,
        "draft_seconds": rounds * gamma * DRAFT + (prefill / 10 if gamma else 0.0),
        "target_seconds": rounds * beta * PASS + prefill,
        "other_seconds": rounds * (PLAIN - PASS) * (1.5 if gamma else 1.0),
    }


def cell(
    title: str,
    *,
    alpha: float = 0.0,
    gamma: int | None = None,
    lossless: bool = True,
    temperature: float = 1.0,
    data: str = "code",
    batch_size: int = 1,
    beta: float = 1.2,
    requests: int = 8,
    rounds: int = 40,
    speedup: float | None = None,
    metrics: dict[str, Any] | None = None,
    joules: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """A cell. Plain decoding has no ``gamma``."""
    generator = random.Random(seed)
    length = gamma or 0
    beta = beta if length else 1.0
    other = (PLAIN - PASS) * (1.5 if length else 1.0)
    step = length * DRAFT + beta * PASS + other
    records = []
    for example in range(requests):
        drawn = generator.choices(range(length + 1), token_probabilities(alpha, length), k=rounds)
        counts = {n: drawn.count(n) for n in set(drawn)}
        noise = [generator.lognormvariate(0, 0.08) for _ in range(rounds)]
        ends = np.cumsum([step * each for each in noise]) + PREFILL
        emitted = sum(drawn) + rounds
        records.append(
            {
                "example": example,
                "turn": 0,
                "prompt_tokens": 12,
                "token_ids": [7] * emitted,
                "origins": "p" * emitted,
                "text": "x",
                "finish_reason": "length",
                "round_seconds": ends.tolist(),
                "round_tokens": [n + 1 for n in drawn],
                "stats": stats(rounds, emitted, counts, length, beta, PREFILL / batch_size),
            }
        )
    tokens = sum(len(each["token_ids"]) for each in records)
    seconds = sum(each["round_seconds"][-1] for each in records)
    ratio = speedup or tokens / seconds * PLAIN
    speeds = tokens / seconds
    firsts = [each["round_seconds"][0] for each in records]
    gaps = [
        (b - a, n)
        for each in records
        for a, b, n in zip(
            each["round_seconds"],
            each["round_seconds"][1:],
            each["round_tokens"][1:],
            strict=False,
        )
    ]
    return {
        "cell": {
            "key": f"{title}-{gamma}-{temperature}-{data}-{batch_size}",
            "method": title,
            "title": title,
            "gamma": gamma,
            "draft": "draft" if length else None,
            "temperature": temperature,
            "data": data,
            "batch_size": batch_size,
            "lossless": lossless,
            "is_baseline": not length,
            "identity": {},
        },
        "data": {"name": data, "source": data, "sha256": "0" * 64, "examples": requests},
        "speed": {
            "tokens_per_second": {
                "mean": speeds,
                "median": speeds,
                "lowest": 0.97 * speeds,
                "highest": 1.03 * speeds,
                "repeats": [speeds],
            },
            "tokens": tokens,
            "seconds": seconds,
            "first_token_seconds": percentiles(firsts),
            "inter_token_seconds": percentiles([gap / n for gap, n in gaps for _ in range(n)]),
            "generation_seconds": {"deviation": 0.05},
            "round_seconds": math.fsum(gap for gap, _ in gaps) / len(gaps),
            "rounds": requests * rounds,
            "drafted": requests * rounds * length,
            "accepted": tokens - requests * rounds,
            "emitted": tokens,
            "acceptance_rate": (tokens - requests * rounds) / max(1, requests * rounds * length),
            "acceptance_length": tokens / (requests * rounds),
            "alpha": alpha if length else None,
            "acceptance_by_class": {"digit": {"verified": 8, "accepted": 7, "rate": 0.875}}
            if length
            else {},
        },
        "speedup": None
        if not length
        else {"ratio": ratio, "low": 0.94 * ratio, "high": 1.05 * ratio, "steady": True},
        "metrics": metrics or {},
        "samples": [
            {
                "id": "0",
                "task": "",
                "turn": 0,
                "prompt": "def f(x):",
                "pieces": [["\n    ", "p"], ["return", "a"], [" x", "c"], [" + 1", "b"]],
            }
        ],
        "error": "",
        "environment": ENVIRONMENT,
        "repeats": [
            {
                "key": "k",
                "number": 0,
                "seed": 0,
                "began": "2026-11-22T10:00:00+00:00",
                "batches": [
                    {"seconds": each["round_seconds"][-1], "requests": [each]} for each in records
                ],
                "readings": {}
                if joules is None
                else {
                    "energy-model": {
                        "joules": joules * tokens,
                        "joules_above_idle": 0.8 * joules * tokens,
                        "estimate": True,
                        "source": "estimate by a two-term model",
                        "constants": {"joules_per_byte": 1e-10},
                    }
                },
                "tokens_per_second": speeds,
            }
        ],
    }


def percentiles(values: list[float]) -> dict[str, float]:
    p50, p90, p99 = (float(each) for each in np.percentile(values, [50, 90, 99]))
    return {"mean": math.fsum(values) / len(values), "p50": p50, "p90": p90, "p99": p99}


def plain(**settings: Any) -> dict[str, Any]:
    """The baseline."""
    return cell("plain", **settings)


def few() -> list[dict[str, Any]]:
    """Cells of one setting with everything that a report shows."""
    return [
        plain(metrics={"perplexity": {"macro": 3.1}}, joules=0.9),
        cell(
            "speculative",
            alpha=0.75,
            gamma=4,
            metrics={"perplexity": {"macro": 3.12}},
            joules=0.5,
        ),
        cell(
            "mentored:budget=0.2",
            alpha=0.85,
            gamma=4,
            lossless=False,
            metrics={"perplexity": {"macro": 2.8}},
            joules=0.42,
            seed=1,
        ),
    ]
