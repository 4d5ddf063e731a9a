"""The distributions of drafted chains and of the target at the same positions.

Legend: B rows, N nodes (γ + 1), V vocabulary, D drafted tokens (γ).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Context,
    Draft,
    Stream,
    Verdict,
    commit_round,
    run_round,
    start_batch,
)
from outrider.drafters import ModelDrafter
from outrider.runtime import HFModel
from outrider.sampling import Sampling, Warp
from outrider.verifiers import Rejection

Seen = Callable[[Draft, Tensor], None]
"""Called with each round's draft and the target's distributions p_BNV."""


@dataclass(frozen=True)
class _Observed(Rejection):
    """Rejection sampling that shows its input to a function."""

    seen: Seen = field(kw_only=True)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        self.seen(draft, p_BNV)
        return super().__call__(draft, p_BNV, rng)


@torch.inference_mode()
def observe_rounds(
    target: HFModel,
    draft: HFModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    gamma: int,
    rounds: int,
    seen: Seen,
) -> None:
    """Runs rounds of speculative decoding with all prompts in one batch.

    Args:
        target, draft: the pair.
        prompts: token ids.
        sampling: of all rows.
        gamma: draft length.
        rounds: how many.
        seen: called in each round, before it is verified.
    """
    num = len(prompts)
    warp = Warp([sampling] * num, target.num_tokens, target.device)
    context = Context.start(
        [list(each) for each in prompts], warp, [sampling.seed] * num, range(num), target.device
    )
    drafter = ModelDrafter(draft, target.num_tokens)
    cache, state = start_batch(context, target, drafter)
    parts = context, target, cache, drafter, state
    for _ in range(rounds):
        round_ = run_round(*parts, _Observed(seen=seen), Budget(gamma))
        commit_round(*parts, round_, round_.verdict.num_accepted_B.tolist())


def expected_accepted(p_BNV: Tensor, q_BNV: Tensor, tokens_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Expected accepted tokens of given drafts by token-level and by block verification, (B,) each.

    The first is Σ_i Π_{j ≤ i} min(1, p_j / q_j). Block verification (Sun et al., ICLR 2025,
    algorithm 2) accepts the longest prefix i whose own coin falls below h_i, so the second is
    Σ_i (1 - Π_{j ≥ i} (1 - h_j)).

    Args:
        p_BNV: the target's distributions at the γ + 1 nodes of a chain.
        q_BNV: the draft's at the γ nodes before the last; more are not read.
        tokens_BN: the root, and the drafted tokens.
    """
    p_BNV, q_BNV = p_BNV.double(), q_BNV.double()
    D = tokens_BN.shape[1] - 1
    drawn_BD1 = tokens_BN[:, 1:, None]
    p_BD = p_BNV[:, :D].gather(2, drawn_BD1)[..., 0]
    q_BD = q_BNV[:, :D].gather(2, drawn_BD1)[..., 0]
    ratio_BD = p_BD / q_BD
    token_B = ratio_BD.clamp(max=1).cumprod(1).sum(1)
    reached_B = torch.ones_like(token_B)
    h: list[Tensor] = []
    for i in range(D):
        reached_B = (reached_B * ratio_BD[:, i]).clamp(max=1)
        if i == D - 1:
            h.append(reached_B)
            continue
        mass_B = (reached_B[:, None] * p_BNV[:, i + 1] - q_BNV[:, i + 1]).clamp(min=0).sum(1)
        below_B = mass_B + 1 - reached_B
        h.append(torch.where(below_B > 0, mass_B / below_B, torch.ones_like(mass_B)))
    missed_BD = (1 - torch.stack(h, 1)).flip(1).cumprod(1)
    return token_B, (1 - missed_BD).sum(1)
