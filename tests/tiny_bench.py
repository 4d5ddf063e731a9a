"""A pair of tiny models with a tokenizer, data sets in memory, and a clock that ticks."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tiny_models import byte_tokenizer, tiny_module

from outrider import Stats
from outrider.lab.bench import BatchRecord, BenchPlan, Repeat, RequestRecord, plan_of
from outrider.lab.data import DataSet, Example
from outrider.runtime import HFModel

TEXTS = ("def f(x):\n", "return x", "print(hello", "world def")


@cache
def tiny_pair() -> dict[str, HFModel]:
    """Target and draft by name; the same objects each time."""
    words = byte_tokenizer()
    size = len(words)
    return {
        "target": HFModel(tiny_module(vocab_size=size), words, name="target"),
        "draft": HFModel(tiny_module(seed=1, vocab_size=size), words, name="draft"),
    }


def tiny_data(num: int = 3, name: str = "tiny", **more: Any) -> DataSet:
    """Prompts with references."""
    examples = tuple(
        Example(TEXTS[i % len(TEXTS)], f"reference {i}", id=str(i), **more) for i in range(num)
    )
    return DataSet(name, examples, f"hash of {num}", "memory", "prompts")


def tiny_plan(**values: Any) -> BenchPlan:
    """A plan for the tiny pair and :func:`tiny_data`."""
    defaults: dict[str, Any] = {
        "target": "target",
        "drafts": ["draft"],
        "methods": ["speculative"],
        "gammas": [3],
        "data": ["memory"],
        "max_new_tokens": 8,
        "repeats": 2,
        "max_repeats": 2,
        "dtype": "float32",
        "device": "cpu",
    }
    return plan_of(defaults | values)


def ticking(step: float = 1.0) -> Callable[[], float]:
    """A clock that goes on by ``step`` seconds at each call."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += step
        return now

    return clock


def request(
    example: int = 0,
    ends: tuple[float, ...] = (1.0,),
    tokens: tuple[int, ...] = (1,),
    origins: str = "",
    **stats: Any,
) -> RequestRecord:
    """A record of rounds that ended at these times with these numbers of tokens."""
    num = sum(tokens)
    letters = origins or "p" * num
    ids = tuple(range(1, num + 1))
    return RequestRecord(example, 0, 5, ids, letters, "text", "length", ends, tokens, stats)


def repeat(number: int, *batches: tuple[float, int], key: str = "key") -> Repeat:
    """A repeat whose batches took these seconds for these numbers of tokens."""
    records = tuple(
        BatchRecord(seconds, (request(index, (seconds,), (tokens,), **vars(Stats())),))
        for index, (seconds, tokens) in enumerate(batches)
    )
    return Repeat(key, number, number, "2026-01-01T00:00:00+00:00", records)
