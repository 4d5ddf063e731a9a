"""The steps of a beam search. Eager code and compiled programs share this loop.

    score(x_1 … x_i) = Σ_j log q(x_j | context, x_1 … x_{j-1})
    of the n beams' n·V continuations, keep k

Which ones are kept is the caller's choice (:data:`Pick`): the best k, or the best k of 2k draws
without replacement, with probabilities ∝ exp(score). Where the logits come from is the caller's
business, too.

Legend: B rows, n beams of a step, k beams kept, V vocabulary, i steps, R draws per step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.search.beam_tree import BeamTree, best, sampled

Pick = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes scores (B, n) and distributions (B, n, V); returns scores and indices of the kept
continuations, best first, each (B, k). An index is beam · V + token. A continuation that does not
exist has the score -inf."""

Distributions = Callable[[BeamTree, Tensor], tuple[Tensor, Tensor | None]]
"""From beams and their scores (B, n) to the distributions after the beams and the logits that these
were made of, if known, each (B, n, V)."""


@dataclass(frozen=True)
class Step:
    """One step of a search.

    Attributes:
        q_BnV: the distributions after the beams before the step.
        logits_BnV: the model's logits after them; None of a search by a compiled program.
        total_B: log of the sum of these beams' likelihoods, which is also the sum over all their
            continuations.
        tree: the beams after the step, best first.
        score_Bn: their log-likelihoods; -inf for beams that do not exist.
    """

    q_BnV: Tensor
    logits_BnV: Tensor | None
    total_B: Tensor
    tree: BeamTree
    score_Bn: Tensor


def search(
    root: BeamTree, picks: Sequence[Pick], distributions: Distributions, dtype: torch.dtype
) -> Iterator[Step]:
    """Runs a search.

    Args:
        root: beams without tokens, usually one.
        picks: one per step.
        distributions: of the next tokens.
        dtype: in which scores are summed.
    """
    tree = root
    (B, n), device = root.path_BnK.shape[:2], root.tokens_BM.device
    score_Bn = torch.zeros(B, n, device=device, dtype=dtype)
    for pick in picks:
        q_BnV, logits_BnV = distributions(tree, score_Bn)
        total_B = score_Bn.logsumexp(1)
        score_Bn, index_Bn = pick(score_Bn, q_BnV)
        V = q_BnV.shape[2]
        tree = tree.grown(index_Bn // V, index_Bn % V)
        yield Step(q_BnV, logits_BnV, total_B, tree, score_Bn)


def keep_best(k: int) -> Pick:
    """Keeps the best k continuations."""
    return lambda score_Bn, q_BnV: best(score_Bn, q_BnV.log(), k)


def keep_best_of_draws(k: int, u_BiR: Tensor) -> list[Pick]:
    """One :data:`Pick` per step: keeps the best k of R draws with these numbers in [0, 1)."""

    def sampling(u_BR: Tensor) -> Pick:
        return lambda score_Bn, q_BnV: sampled(score_Bn, q_BnV, k, u_BR)

    return [sampling(u_BR) for u_BR in u_BiR.unbind(1)]


def score_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which scores are summed: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
