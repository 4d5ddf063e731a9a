"""Greedy verification: keep drafted tokens while they are the target's argmax.

The limit of speculative sampling at temperature 0 (Leviathan et al., ICML 2023, section 2.3), and
SpecInfer's greedy tree verification (Miao et al., ASPLOS 2024, Algorithm 2, ``VerifyGreedy``).

    accept x   iff   x = argmax p

Preserves: the argmax sequence. Accepts any draft. Computes no probabilities.

Legend: B rows, N nodes, D candidates along a chain (N-1), V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.core import Draft, Drawn, Stream, Verdict, path_to


@dataclass(frozen=True)
class Greedy:
    """Exact match with the target's argmax, on chains and trees."""

    lossless: bool = True
    accepts: frozenset[Drawn] = frozenset({"iid", "distinct", "chosen"})
    needs: Literal["law", "argmax"] = "argmax"

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        best_BN = p_BNV.argmax(-1)
        parents_BD = draft.parents_BN[:, 1:]
        fits_BD = (best_BN.gather(1, parents_BD) == draft.tokens_BN[:, 1:]) & draft.mask_BN[:, 1:]
        if draft.is_chain:
            num_accepted_B = fits_BD.long().cumprod(1).sum(1)
            node_B = num_accepted_B
            path_BD = parents_BD + 1
        else:
            node_B = _deepest(draft, fits_BD)
            num_accepted_B = draft.depth_BN.gather(1, node_B[:, None])[:, 0]
            path_BD = path_to(draft, node_B)
        return Verdict(path_BD, num_accepted_B, best_BN.gather(1, node_B[:, None])[:, 0])


def _deepest(draft: Draft, fits_BD: Tensor) -> Tensor:
    """The deepest node all of whose ancestors fit (the first of equals), shape (B,)."""
    fits_BN = torch.nn.functional.pad(fits_BD, (1, 0), value=True)
    reached_BN = (fits_BN[:, None, :] | ~draft.ancestors_BNN).all(2)
    return torch.where(reached_BN, draft.depth_BN, -1).argmax(1)
