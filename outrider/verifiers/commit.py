"""Commits the result of a search unverified: the rule of multi-token joint greedy decoding.

Qin et al., "Multi-Token Joint Speculative Decoding for Accelerating Large Language Model
Inference", 2024, section 3 (MJGD): repeat a beam search of γ tokens with the target, and append the
best beam. The drafter runs the search (``MjgdDrafter``, with the target itself as its model); the
rule reads no probabilities.

    emit x_1 … x_γ        (x_1 … x_{γ-1} as accepted, x_γ as the next token: there is no bonus)

An empty draft emits argmax p, which is the best beam of length 1.

Preserves: the result of the search. If the target searched, its joint likelihood is at least that
of every other beam that the search ended with. Accepts searched chains.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core import Bound, Draft, Drawn, Needs, Stream, Verdict, require_chain


@dataclass(frozen=True)
class Commit:
    """Emits every drafted token and nothing else."""

    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"searched"})
    needs: ClassVar[Needs] = "argmax"
    bound: ClassVar[Bound] = Bound("the best beam of a search, emitted without verification")

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Verifies a batch of chains.

        Raises:
            IncompatibleError: the draft has branches; the rule emits a single path.
        """
        require_chain(self, draft)
        B, N = draft.tokens_BN.shape
        last_B = draft.num_drafted_B
        last_token_B = draft.tokens_BN.gather(1, last_B[:, None])[:, 0]
        next_B = torch.where(last_B > 0, last_token_B, p_BNV[:, 0].argmax(-1))
        path_BD = torch.arange(1, N, device=p_BNV.device).expand(B, N - 1)
        return Verdict(path_BD, (last_B - 1).clamp(min=0), next_B)
