"""CHI2: compares many runs of the real sampler with exact probabilities.

The test is Pearson's chi-square test. Every row of one large batch is a request of its own, so the
batch dimension provides the repetitions. Rounds are repeated until every row has emitted enough
tokens, which also tests that states and random numbers carry over from round to round.

The probability that a correct method fails equals the threshold that its p-value is compared with.

Legend: B rows, T context length, K emitted tokens, S sequences (V^length, the first token is the
most significant digit), C cells of the histogram.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Drafter,
    Model,
    Verifier,
    commit_round,
    row_keys,
    run_round,
    start_batch,
)
from outrider.testing.enumerate import (
    DistributionFactory,
    ScriptedContext,
    softmax_distribution,
    target_distribution,
)

_BATCH_SIZE = 1 << 14


def chi2_p_value(counts_C: Tensor, probs_C: Tensor, min_expected: float = 10.0) -> float:
    """The probability of a Pearson statistic at least this large if ``probs`` is the distribution.

    Cells with fewer than ``min_expected`` expected counts are pooled. A count in a cell of
    probability zero gives 0.
    """
    counts_C, probs_C = counts_C.double(), probs_C.double()
    if bool((counts_C[probs_C <= 0] > 0).any()):
        return 0.0
    expected_C = probs_C / probs_C.sum() * counts_C.sum()
    small_C = expected_C < min_expected
    observed = torch.cat([counts_C[~small_C], counts_C[small_C].sum()[None]])
    expected = torch.cat([expected_C[~small_C], expected_C[small_C].sum()[None]])
    if 0 < float(expected[-1]) < min_expected and len(expected) > 1:
        least = expected[:-1].argmin()  # the pool itself is small: merge it with the smallest cell
        observed[least] += observed[-1]
        expected[least] += expected[-1]
        observed[-1] = expected[-1] = 0
    present = expected > 0
    statistic = ((observed - expected)[present] ** 2 / expected[present]).sum()
    degrees = int(present.sum()) - 1
    return (
        float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), statistic / 2))
        if (degrees > 0)
        else 1.0
    )


def sample_rounds(
    target: Model[Any],
    drafter: Drafter[Any],
    verifier: Verifier,
    num_tokens: int = 3,
    *,
    length: int,
    num_rows: int,
    prompt: Sequence[int] = (0, 1),
    row_tokens: Tensor | None = None,
    distribution: DistributionFactory = softmax_distribution,
    seed: int = 0,
) -> Tensor:
    """The first ``length`` emitted tokens of many requests with the same prompt, (B, length)."""
    tokens = []
    for first in range(
        0, num_rows, _BATCH_SIZE
    ):  # rows are independent; small batches fit into the CPU caches
        rows = list(range(first, min(first + _BATCH_SIZE, num_rows)))
        key_B = row_keys([seed] * len(rows), rows, "cpu")
        context = ScriptedContext.repeat(prompt, len(rows), distribution, key_B)
        cache, state = start_batch(context, target, drafter)
        budget = Budget(num_tokens, None if row_tokens is None else row_tokens[rows])
        while min(context.lengths) < len(prompt) + length:
            parts = context, target, cache, drafter, state
            done = run_round(*parts, verifier, budget)
            commit_round(*parts, done, done.verdict.num_accepted_B.tolist())
        tokens.append(context.tokens_BT[:, len(prompt) : len(prompt) + length])
    return torch.cat(tokens)


def chi2(
    target: Model[Any],
    drafter: Drafter[Any],
    verifier: Verifier,
    num_tokens: int = 3,
    *,
    length: int = 4,
    num_rows: int = 200_000,
    prompt: Sequence[int] = (0, 1),
    distribution: DistributionFactory = softmax_distribution,
    seed: int = 0,
) -> float:
    """The p-value of the real sampler's sequences under the target's own distribution.

    For a lossless method it is uniform in [0, 1] over seeds. With a threshold of 1e-4 the test
    therefore fails a correct method for one in 10,000 seeds (with a fixed seed: always or never).
    """
    tokens_BK = sample_rounds(
        target,
        drafter,
        verifier,
        num_tokens,
        length=length,
        num_rows=num_rows,
        prompt=prompt,
        distribution=distribution,
        seed=seed,
    )
    probs_S = target_distribution(target, prompt, length, distribution)
    vocab_size = round(len(probs_S) ** (1 / length))
    index_B = torch.zeros(num_rows, dtype=torch.int64)
    for token_B in tokens_BK.unbind(1):
        index_B = index_B * vocab_size + token_B
    return chi2_p_value(torch.bincount(index_B, minlength=len(probs_S)), probs_S)
