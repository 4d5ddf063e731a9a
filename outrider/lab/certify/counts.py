"""Tokens against the distributions that they should come from, by counting.

Token b should be a draw from a distribution of its own, q_b, given what came before. In any class
of tokens c, and among any of the rows picked by what came before,

    S = Σ_b ( 1[x_b ∈ c] - q_b(c) ),    v = Σ_b q_b(c) (1 - q_b(c)),
    P(|S| >= s) <= 2 exp( -s² / (2 (v + s/3)) )                     (Bernstein's inequality)

which holds for every number of rows, however small the probabilities, and not only in the limit.

Legend: B rows, N nodes, L tokens of a continuation, C classes of tokens, G groups of rows,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core import Budget, Draft, Prefix
from outrider.lab.certify.pair import Pair, able
from outrider.lab.certify.report import FALSE_ALARM, STATISTICAL_CHECKS, Check
from outrider.testing import check_draft

DRAFTS, TOKENS = "drafts", "tokens"
_NUM_TOKENS = (
    6  # classes: so many single tokens, the distribution's best, its next, and the improbable
)
_NUM_VALUES = 4  # groups: rows whose token before has one of so many values, and all rows


@dataclass
class Tally:
    """Sums over batches at one place; classes and groups are fixed by the first batch's
    distributions."""

    tokens: Tensor | None = None
    values: Tensor | None = None
    sums: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    impossible: int = 0

    def add(self, x_B: Tensor, q_BV: Tensor, before_B: Tensor) -> None:
        """Tokens, the distributions they should come from, and the tokens before them."""
        if not len(x_B):
            return
        x_B, q_BV, before_B = able(x_B), able(q_BV).double(), able(before_B)
        if self.tokens is None or self.values is None:
            self.tokens = q_BV.mean(0).topk(min(_NUM_TOKENS, q_BV.shape[1])).indices
            values, counts = before_B.unique(return_counts=True)
            self.values = values[counts.argsort(descending=True)[:_NUM_VALUES]]
        q_B = q_BV.gather(1, x_B[:, None])[:, 0]
        self.impossible += int((q_B <= 0).sum())
        best_B2 = q_BV.topk(2).indices
        is_BC = torch.cat([x_B[:, None] == best_B2, x_B[:, None] == self.tokens], 1)
        expected_BC = torch.cat([q_BV.gather(1, best_B2), q_BV[:, self.tokens]], 1)
        for limit in (0.02, 0.2):  # improbable tokens
            expected_B = q_BV.where(q_BV < limit, 0.0).sum(1)
            expected_BC = torch.cat([expected_BC, expected_B[:, None]], 1)
            is_BC = torch.cat([is_BC, (q_B < limit)[:, None]], 1)
        all_B1 = torch.ones_like(x_B, dtype=torch.bool)[:, None]
        in_BG = torch.cat([all_B1, before_B[:, None] == self.values], 1).double()
        S_GC = in_BG.T @ (is_BC.double() - expected_BC)
        v_GC = in_BG.T @ (expected_BC * (1 - expected_BC)).clamp(min=0)
        self.sums.append((S_GC, v_GC))

    def log_p(self) -> Tensor:
        """Logarithm of the bound of every class in every group."""
        if not self.sums:
            return torch.zeros(0, dtype=torch.float64)
        s_GC = torch.stack([S_GC for S_GC, _ in self.sums]).sum(0).abs()
        v_GC = torch.stack([v_GC for _, v_GC in self.sums]).sum(0)
        exponent_GC = torch.where(s_GC > 1e-3, s_GC**2 / (2 * (v_GC + s_GC / 3)), 0.0)
        return (torch.tensor(2.0).log() - exponent_GC).flatten().cpu()


def verification(name: str, tallies: Sequence[Tally], what: str) -> Check:
    """All classes of all tallies together, at this check's share of the false alarms."""
    impossible = sum(tally.impossible for tally in tallies)
    if impossible:
        return Check(
            name, False, 0.0, f"{impossible} {what} have probability zero in their distribution"
        )
    logs = torch.cat([tally.log_p() for tally in tallies])
    if not len(logs):
        return Check.skipped(name, "nothing to count")
    p_value = min(1.0, float(logs.min().exp()) * len(logs))
    threshold = FALSE_ALARM / STATISTICAL_CHECKS
    words = f"p-value (bound) of {what}, {len(logs)} counts; fails below {threshold:.2g}"
    return Check(name, p_value > threshold, p_value, words)


def check_drafts(
    pair: Pair, prompts: Sequence[Sequence[int]], num: int, first_request: int
) -> Check:
    """Drafts are well formed, and their tokens are drawn from the distributions they declare."""
    everywhere = Tally()
    tallies = [everywhere]
    drafted = 0
    for round_, prompt in enumerate(prompts):
        mine = [Tally() for _ in range(4 * pair.num_tokens + 1)]
        tallies += mine
        begun = first_request + round_ * num
        for size in pair.batches(num):
            context = pair.context([prompt] * size, begun)
            begun += size
            state = pair.drafter.start(context)
            budget = Budget(pair.num_tokens)
            draft = pair.drafter.propose(state, context, budget, context.rng)
            if draft.probs_BNV is None or draft.drawn == "searched":
                return Check.skipped(DRAFTS, f"tokens are {draft.drawn}, not drawn")
            try:
                check_draft(draft, context, budget, draft.probs_BNV.shape[2], draft.drawn)
            except AssertionError as broken:
                return Check(DRAFTS, False, None, str(broken))
            drafted += _count(draft, mine, everywhere)
    if not drafted:
        return Check.skipped(DRAFTS, "nothing is drafted")
    return verification(DRAFTS, tallies, f"{drafted} drafted tokens")


def _count(draft: Draft, tallies: list[Tally], everywhere: Tally) -> int:
    """Node by node: the existing tokens against the distribution at their parent."""
    assert draft.probs_BNV is not None
    rows_B = torch.arange(draft.tokens_BN.shape[0], device=draft.tokens_BN.device)
    for i in range(1, draft.num_nodes):
        parent_B, exists_B = draft.parents_BN[:, i], draft.mask_BN[:, i]
        q_BV = draft.probs_BNV[rows_B, parent_B]
        if draft.drawn == "distinct":
            for j in range(1, i):
                sibling_B = (draft.parents_BN[:, j] == parent_B) & draft.mask_BN[:, j]
                without_BV = q_BV.scatter(1, draft.tokens_BN[:, j, None], 0.0)
                q_BV = torch.where(sibling_B[:, None], without_BV, q_BV)
            q_BV = q_BV / q_BV.sum(1, keepdim=True).clamp(min=1e-30)
        before_B = draft.tokens_BN[:, i - 1]
        for tally in (tallies[min(i, len(tallies) - 1)], everywhere):
            tally.add(draft.tokens_BN[exists_B, i], q_BV[exists_B], before_B[exists_B])
    return int(draft.mask_BN[:, 1:].sum())


def check_tokens(
    pair: Pair, prompts: Sequence[Sequence[int]], samples: Sequence[Tensor], verified: bool
) -> Check:
    """Emitted tokens against the target's distribution from scratch, each given the tokens before
    it."""
    everywhere = Tally()
    tallies = [everywhere]
    for prompt, tokens_BL in zip(prompts, samples, strict=True):
        L = tokens_BL.shape[1]
        mine = [Tally() for _ in range(L)]
        tallies += mine
        for part_BL in tokens_BL.split(pair.batch_size):
            context = pair.context([prompt] * len(part_BL), 0)
            part_BL = part_BL.to(context.device)
            nodes_BL = torch.cat([context.root_B[:, None], part_BL[:, :-1]], 1)
            draft = Draft.chain(
                nodes_BL, torch.ones_like(nodes_BL, dtype=torch.bool), None, "chosen"
            )
            logits_BLV = pair.target.score(pair.target.start(context), draft).logits_BNV
            p_BLV = context.distribution(logits_BLV, Prefix.of_draft(context, draft))
            for place in range(L):
                for tally in (mine[place], everywhere):
                    tally.add(part_BL[:, place], p_BLV[:, place], nodes_BL[:, place])
    total = sum(tokens_BL.numel() for tokens_BL in samples)
    check = verification(TOKENS, tallies, f"{total} emitted tokens")
    return check if verified else Check(TOKENS, None, check.number, check.words)
