"""Counts drafted and emitted tokens and compares them with their declared distributions.

The token x_b should be a draw from its own distribution q_b, given the tokens before it. For any
class c of tokens, and any group of rows chosen by the tokens before x_b,

    S = Σ_b ( 1[x_b ∈ c] - q_b(c) ),    v = Σ_b q_b(c) (1 - q_b(c)),
    P(|S| >= s) <= 2 exp( -s² / (2 (v + s/3)) )                     (Bernstein's inequality)

The bound holds for every number of rows and for any probabilities, however small; it is not
asymptotic.

Legend: B rows, N nodes, T tokens of a continuation, C classes of tokens, G groups of rows,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core import Budget, Draft, Prefix
from outrider.lab.certify.pair import Pair, on_float64_device
from outrider.lab.certify.report import FALSE_ALARM, STATISTICAL_CHECKS, Check
from outrider.testing import check_draft

DRAFTS, TOKENS = "drafts", "tokens"
# Classes: this many single tokens; the most probable token and the second; the improbable tokens.
_NUM_TOKENS = 6
# Groups: all rows, and the rows whose previous token has one of this many values.
_NUM_VALUES = 4
_IMPROBABLE = (0.02, 0.2)  # a class of all tokens below each of these probabilities


@dataclass
class Tally:
    """S and v of every class and group at one position, summed over batches.

    The first batch fixes the classes and the groups.

    Attributes:
        tokens: the single tokens that are classes.
        values: previous tokens that define the groups.
        sums: (S_GC, v_GC) of each batch.
        impossible: number of tokens whose probability was zero.
    """

    tokens: Tensor | None = None
    values: Tensor | None = None
    sums: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    impossible: int = 0

    def add(self, x_B: Tensor, q_BV: Tensor, before_B: Tensor) -> None:
        """Adds a batch: the tokens, the distributions they should come from, the previous tokens.

        Moves the tensors to a device with float64.
        """
        if not len(x_B):
            return
        x_B, q_BV, before_B = (
            on_float64_device(x_B),
            on_float64_device(q_BV).double(),
            on_float64_device(before_B),
        )
        if self.tokens is None or self.values is None:
            self.tokens = q_BV.mean(0).topk(min(_NUM_TOKENS, q_BV.shape[1])).indices
            values, counts = before_B.unique(return_counts=True)
            self.values = values[counts.argsort(descending=True)[:_NUM_VALUES]]
        q_B = q_BV.gather(1, x_B[:, None])[:, 0]
        self.impossible += int((q_B <= 0).sum())
        best_B2 = q_BV.topk(2).indices
        is_BC = torch.cat([x_B[:, None] == best_B2, x_B[:, None] == self.tokens], 1)
        expected_BC = torch.cat([q_BV.gather(1, best_B2), q_BV[:, self.tokens]], 1)
        for limit in _IMPROBABLE:
            expected_B = q_BV.where(q_BV < limit, 0.0).sum(1)
            expected_BC = torch.cat([expected_BC, expected_B[:, None]], 1)
            is_BC = torch.cat([is_BC, (q_B < limit)[:, None]], 1)
        all_B1 = torch.ones_like(x_B, dtype=torch.bool)[:, None]
        in_BG = torch.cat([all_B1, before_B[:, None] == self.values], 1).double()
        S_GC = in_BG.T @ (is_BC.double() - expected_BC)
        v_GC = in_BG.T @ (expected_BC * (1 - expected_BC)).clamp(min=0)
        self.sums.append((S_GC, v_GC))

    def log_p(self) -> Tensor:
        """Logarithm of Bernstein's bound for every class in every group, flattened."""
        if not self.sums:
            return torch.zeros(0, dtype=torch.float64)
        s_GC = torch.stack([S_GC for S_GC, _ in self.sums]).sum(0).abs()
        v_GC = torch.stack([v_GC for _, v_GC in self.sums]).sum(0)
        exponent_GC = torch.where(s_GC > 1e-3, s_GC**2 / (2 * (v_GC + s_GC / 3)), 0.0)
        return (torch.tensor(2.0).log() - exponent_GC).flatten().cpu()


def check_tallies(name: str, tallies: Sequence[Tally], what: str) -> Check:
    """The smallest bound over all classes and groups, corrected for their number.

    Fails at this check's share of the false-alarm probability.

    Args:
        name: of the check.
        tallies: of all positions.
        what: was counted, for the report.
    """
    impossible = sum(tally.impossible for tally in tallies)
    if impossible:
        return Check(
            name, False, 0.0, f"{impossible} of {what} have probability zero in their distribution"
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
    """Checks that drafts are well formed and drawn from the distributions that they declare.

    Args:
        pair: the models, the drafter and the rule.
        prompts: token ids.
        num: drafts per prompt.
        first_request: request number of the first draft; the others follow.
    """
    all_nodes = Tally()
    tallies = [all_nodes]
    drafted = 0
    for index, prompt in enumerate(prompts):
        by_node = [Tally() for _ in range(4 * pair.num_tokens + 1)]
        tallies += by_node
        request = first_request + index * num
        for size in pair.batches(num):
            context = pair.context([prompt] * size, request)
            request += size
            state = pair.drafter.start(context)
            budget = Budget(pair.num_tokens)
            draft = pair.drafter.propose(state, context, budget, context.rng)
            if draft.probs_BNV is None or draft.drawn == "searched":
                return Check.skipped(DRAFTS, f"drafted tokens are {draft.drawn}, not drawn")
            try:
                check_draft(draft, context, budget, draft.probs_BNV.shape[2], draft.drawn)
            except AssertionError as error:
                return Check(DRAFTS, False, None, str(error))
            drafted += _count(draft, by_node, all_nodes)
    if not drafted:
        return Check.skipped(DRAFTS, "nothing is drafted")
    return check_tallies(DRAFTS, tallies, f"{drafted} drafted tokens")


def _count(draft: Draft, by_node: list[Tally], all_nodes: Tally) -> int:
    """Tallies each drafted token against the distribution at its parent; returns their number.

    For siblings drawn without replacement, earlier siblings are removed from the distribution.
    """
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
        for tally in (by_node[min(i, len(by_node) - 1)], all_nodes):
            tally.add(draft.tokens_BN[exists_B, i], q_BV[exists_B], before_B[exists_B])
    return int(draft.mask_BN[:, 1:].sum())


def check_tokens(
    pair: Pair, prompts: Sequence[Sequence[int]], samples: Sequence[Tensor], verified: bool
) -> Check:
    """Counts emitted tokens against the target's distribution from scratch at their position.

    Args:
        pair: the models, the drafter and the rule.
        prompts: token ids.
        samples: the continuations of each prompt, (B, T).
        verified: whether a deviation fails the check; without, it is only reported.
    """
    all_positions = Tally()
    tallies = [all_positions]
    for prompt, tokens_BT in zip(prompts, samples, strict=True):
        T = tokens_BT.shape[1]
        by_position = [Tally() for _ in range(T)]
        tallies += by_position
        for part_BT in tokens_BT.split(pair.batch_size):
            context = pair.context([prompt] * len(part_BT), 0)
            part_BT = part_BT.to(context.device)
            nodes_BT = torch.cat([context.root_B[:, None], part_BT[:, :-1]], 1)
            draft = Draft.chain(
                nodes_BT, torch.ones_like(nodes_BT, dtype=torch.bool), None, "chosen"
            )
            logits_BTV = pair.target.score(pair.target.start(context), draft).logits_BNV
            p_BTV = context.distribution(logits_BTV, Prefix.of_draft(context, draft))
            for t in range(T):
                for tally in (by_position[t], all_positions):
                    tally.add(part_BT[:, t], p_BTV[:, t], nodes_BT[:, t])
    total = sum(tokens_BT.numel() for tokens_BT in samples)
    check = check_tallies(TOKENS, tallies, f"{total} emitted tokens")
    return check if verified else Check(TOKENS, None, check.number, check.words)
