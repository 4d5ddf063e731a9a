"""Commits what a search found, whole: the rule of multi-token joint greedy decoding.

Qin et al., "Multi-Token Joint Speculative Decoding for Accelerating Large Language Model
Inference", 2024, section 3 (MJGD): repeat a beam search of K tokens with the target, and append the
best beam. The search is the drafter's (``MjgdDrafter``, over the target itself); the rule looks at
no probability.

    emit x_1 … x_K        (x_1 … x_{K-1} as accepted, x_K as the next token: there is no bonus)

An empty draft emits argmax p, the best beam of length 1.

Preserves: the search's text; with the target's own beams, a joint likelihood no less than that of
what else the search ended with. Accepts searched chains.

Legend: B rows, N nodes, D candidates (N-1), V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core import Bound, Draft, Drawn, Needs, Stream, Verdict, require_chain


@dataclass(frozen=True)
class Commit:
    """Every candidate, and nothing else."""

    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"searched"})
    needs: ClassVar[Needs] = "argmax"
    bound: ClassVar[Bound] = Bound("the best beam of a search, whatever p says of its tokens")

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Verifies a batch of chains.

        Raises:
            IncompatibleError: a draft with branches; the rule is for one path.
        """
        require_chain(self, draft)
        B, N = draft.tokens_BN.shape
        last_B = draft.num_drafted_B
        last_token_B = draft.tokens_BN.gather(1, last_B[:, None])[:, 0]
        next_B = torch.where(last_B > 0, last_token_B, p_BNV[:, 0].argmax(-1))
        path_BD = torch.arange(1, N, device=p_BNV.device).expand(B, N - 1)
        return Verdict(path_BD, (last_B - 1).clamp(min=0), next_B)
