"""The cost of drafts by copying, measured along a text of the corpus without running a model.

Each round commits the drafted tokens that match the text, and one token more. Timed is ``propose``,
which includes reading the new tokens and updating the index.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from outrider import Sampling
from outrider.core import Budget, Context, Lengths
from outrider.drafters.lookup.prompt_lookup import PromptLookup
from outrider.drafters.lookup.suffix import SuffixDecoding
from outrider.sampling import Warp

CONTEXT = 8000
CORPUS = 50_000
ROWS = (1, 16)
SHIFT = 53


@dataclass(frozen=True)
class Configuration:
    """A drafter, perhaps with a corpus of earlier texts, and its budget in tokens."""

    name: str
    drafter: PromptLookup | SuffixDecoding
    num_tokens: int


def configurations(earlier: list[int]) -> Iterator[Configuration]:
    """All drafters whose cost is measured; ``earlier`` is the corpus that some of them know."""
    yield Configuration("prompt lookup", PromptLookup(), 10)
    yield Configuration("suffix", SuffixDecoding(), 16)
    for shape in ("chain", "tree"):
        drafter = SuffixDecoding(shape)
        for begin in range(0, len(earlier), 1000):
            drafter.corpus.add(earlier[begin : begin + 1000])
        tokens = drafter.corpus.num_tokens
        yield Configuration(f"suffix, {shape}, {tokens:,} tokens of corpus", drafter, 16)


@torch.inference_mode()
def cost(
    configuration: Configuration, text: list[int], context_length: int, rows: int
) -> dict[str, Any]:
    """Microseconds per draft and row along the text, and bytes per token of the rows' indices.

    Each row begins ``SHIFT`` tokens later in the text than the row before.
    """
    texts = [text[SHIFT * row :] for row in range(rows)]
    distribution = Warp([Sampling(temperature=0)] * rows, max(text) + 1)
    prompts = [each[:context_length] for each in texts]
    context = Context.start(prompts, distribution, [0] * rows, range(rows))
    drafter, budget = configuration.drafter, Budget(configuration.num_tokens)
    began = time.perf_counter()
    state: Any = drafter.start(context)
    started = time.perf_counter() - began
    times, drafted, accepted = [], 0, 0
    while max(context.lengths) + SHIFT * rows + configuration.num_tokens < len(text):
        rng = context.rng
        began = time.perf_counter()
        draft = drafter.propose(state, context, budget, rng)
        times.append(1e6 * (time.perf_counter() - began) / rows)
        new = [
            each[at : at + 1 + _num_matching(tokens, parents, mask, each, at)]
            for tokens, parents, mask, each, at in zip(
                draft.tokens_BN.tolist(),
                draft.parents_BN.tolist(),
                draft.mask_BN.tolist(),
                texts,
                context.lengths,
                strict=True,
            )
        ]
        lengths = [len(each) for each in new]
        drafted += int(draft.num_drafted_B.sum())
        accepted += sum(lengths) - rows
        padded = [[*each, *[0] * (max(lengths) - len(each))] for each in new]
        context.append(torch.tensor(padded), Lengths.of(lengths))
    ordered = statistics.quantiles(times, n=20)
    held = sum(getattr(reader, "index", reader).num_bytes for reader in state.readers)
    return {
        "rows": rows,
        "rounds": len(times),
        "drafted": drafted / len(times) / rows,
        "accepted": accepted / len(times) / rows,
        "median": statistics.median(times),
        "5th": ordered[0],
        "lower_quartile": ordered[4],
        "upper_quartile": ordered[14],
        "95th": ordered[18],
        "bytes": held / sum(state.read),
        "start_per_token": 1e6 * started / context_length / rows,
    }


def _num_matching(
    tokens: list[int], parents: list[int], mask: list[bool], text: list[int], position: int
) -> int:
    """The number of drafted tokens along a path that match the text from a position on."""
    node, depth = 0, 0
    for child in range(1, len(tokens)):
        if mask[child] and parents[child] == node and tokens[child] == text[position + depth]:
            node, depth = child, depth + 1
    return depth
