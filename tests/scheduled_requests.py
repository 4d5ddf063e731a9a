"""A pair of tiny models, prompts of many lengths, and a scheduler run to the end."""

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import engine_of, ragged_prompts, tiny

from outrider import Engine, Sampling
from outrider.engine import Row, Scheduler

TARGET = tiny(dtype=torch.float64, std=0.2)
DRAFT = tiny(dtype=torch.float64, std=0.18)
LENGTHS = [9, 1, 17, 4, 4, 12, 30, 2, 8, 5, 21, 3, 6, 11, 7, 14]
PROMPTS = ragged_prompts(LENGTHS)


def engine(method: str = "speculative", **settings: Any) -> Engine:
    return engine_of(TARGET, None if method == "plain" else DRAFT, method, **settings)


def sampled(num: int, **settings: Any) -> Sampling:
    return Sampling(temperature=0.9, max_new_tokens=num, ignore_eos=True, **settings)


def alone(each: Engine, prompts: Sequence[list[int]], sampling: Sampling) -> list[tuple[int, ...]]:
    """What each prompt gives by itself."""
    return [each.generate([prompt], sampling)[0].token_ids for prompt in prompts]


def finish(scheduler: Scheduler, num_requests: int) -> dict[int, Row]:
    """Runs steps until so many requests are over; their rows."""
    rows: dict[int, Row] = {}
    for _ in range(1000):
        rows |= {each.request_id: each.row for each in scheduler.step() if each.row.over}
        if len(rows) == num_requests:
            return rows
    raise AssertionError("requests do not end")
