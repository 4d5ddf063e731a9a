"""Resident memory of a process whose engine decodes requests that come and go.

Used by ``benchmarks.memory``. Prompts and outputs have random lengths, so KV buffers grow, shrink
and are reused. Growth is therefore looked for in what belongs to no tensor, over the second half of
the rounds, when caches have filled, and in the most that tensors take in either half.
"""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from benchmarks.memory_in_use import MemoryInUse
from outrider import Engine, Sampling
from outrider.runtime import HFModel

VOCAB = 256
SAMPLING = Sampling()
TREE = "3,2,1"
"""A topology of 16 nodes, the root included."""
WARM_UP, EVERY = 0.1, 0.05
"""Shares of the rounds before the first reading, and between two readings."""


def embedded() -> Engine:
    """The embedded pair, compiled, one row; short drafts give more rounds."""
    return outrider.load(num_speculative_tokens=2, max_batch_size=1, compile="auto")


def bounded() -> Engine:
    """Two small random models, eager, four rows, int8 KV buffers of at most 1 MiB, short drafts."""
    target, draft = random_model(2, 0), random_model(1, 1)
    method = outrider.METHODS["speculative"]
    memory: dict[str, Any] = {"kv_dtype": "int8", "max_memory": "1MiB"}
    return Engine(target, draft, method, num_speculative_tokens=2, max_batch_size=4, **memory)


def tree() -> Engine:
    """The embedded pair, compiled, one row, trees of 1 + 3 + 6 + 6 nodes."""
    options = {"topology": TREE}
    return outrider.load(method="specinfer", options=options, max_batch_size=1, compile="auto")


def arrivals() -> Engine:
    """The embedded pair, compiled, 16 rows, which others join whenever one ends."""
    return outrider.load(num_speculative_tokens=2, max_batch_size=16, compile="auto")


@dataclass(frozen=True)
class Life:
    """An engine and what it decodes.

    Attributes:
        name: on the page.
        make: the engine.
        sampling: of every request; lengths are random.
        requests: how many are added at once.
    """

    name: str
    make: Callable[[], Engine]
    sampling: Sampling = SAMPLING
    requests: int = 8


ENGINES: dict[str, Life] = {
    "compiled": Life("embedded pair, compiled, one row, γ = 2", embedded),
    "bounded": Life(
        "two random models, four rows, γ = 2, int8 KV buffers of at most 1 MiB", bounded
    ),
    "tree": Life("embedded pair, compiled, one row, a tree of 16 nodes", tree),
    "top-p": Life(
        "embedded pair, compiled, one row, γ = 2, top-p 0.9", embedded, Sampling(top_p=0.9)
    ),
    "arrivals": Life(
        "embedded pair, compiled, 16 rows that come and go, γ = 2", arrivals, requests=48
    ),
}


def random_model(layers: int, seed: int) -> HFModel:
    """A small model with random weights."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    module = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return HFModel(module)


def rounds(
    num: int, engine: Engine, sampling: Sampling = SAMPLING, requests: int = 8
) -> dict[str, Any]:
    """Runs random requests and records the resident memory after a tenth of the rounds as warm-up.

    Args:
        num: rounds.
        engine: decodes the requests.
        sampling: of every request; lengths are random.
        requests: how many are added at once.

    Returns:
        ``resident``: MiB by the number of rounds; ``slope``: their least-squares slope in KiB per
        thousand rounds; ``range``: the largest minus the smallest, in MiB; ``tensors``: the most
        MiB of tensors in either half of the readings; ``other``: the MiB in use besides, at the
        first and last reading; ``other_slope``: as ``slope``, of the second half; ``texts``: the
        number of finished requests.
    """
    first, every = max(1, int(WARM_UP * num)), max(1, int(EVERY * num))
    found: dict[int, MemoryInUse] = {}
    done = finished = 0
    score = engine.target.score

    def counting(*arguments: Any) -> Any:
        nonlocal done
        done += 1
        if first <= done <= num and (done - first) % every == 0:
            found[done] = MemoryInUse.read()
        return score(*arguments)

    engine.target.score = counting  # type: ignore[method-assign, assignment]
    dice = random.Random(0)
    while done < num:
        prompts = [
            [dice.randrange(VOCAB) for _ in range(dice.randint(1, 60))] for _ in range(requests)
        ]
        lengths = [dice.randint(1, 240) for _ in prompts]
        samplings = [replace(sampling, max_new_tokens=n, ignore_eos=True) for n in lengths]
        finished += len(engine.generate(prompts, samplings))
    resident = {done: each.resident for done, each in found.items()}
    other = {done: each.other for done, each in found.items()}
    tensors, half = [each.tensors for each in found.values()], len(found) // 2
    return {
        "resident": resident,
        "slope": _slope(resident),
        "range": max(resident.values()) - min(resident.values()),
        "tensors": [max(tensors[:half]), max(tensors[half:])],
        "other": [other[min(other)], other[max(other)]],
        "other_slope": _slope(dict(list(other.items())[half:])),
        "texts": finished,
    }


def _slope(read: dict[int, float]) -> float:
    """The least-squares slope of MiB by rounds, in KiB per thousand rounds."""
    return statistics.linear_regression(list(read), list(read.values())).slope * 1024 * 1000
