"""Runs real rounds of the pair, collects their distributions, and checks the target's KV cache.

Legend: B rows, N nodes, D drafted nodes (N-1), K positions, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core import Context, Draft, Round
from outrider.lab.certify.pair import Batch, Pair, on_float64_device
from outrider.lab.certify.positions import DraftedPositions, divergence
from outrider.lab.certify.report import Check

STATES = "states"
_ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}
_REPORTED = 1e-4  # a rounding error of the target that the verdict mentions
_MAX_ROWS = 32
_CHECKED_ROUNDS = 4  # the first rounds, in which the cache is checked
_MIN_ROUNDS = 4
_MAX_IDLE_ROUNDS = 8  # rounds in a row without a draft, after which the run ends


def observe(
    pair: Pair, prompts: Sequence[Sequence[int]], num_positions: int
) -> tuple[DraftedPositions | None, Check]:
    """Runs rounds from each prompt until there are enough drafted positions.

    Args:
        pair: the models, the drafter and the rule.
        prompts: token ids; a prompt may be used for several rows.
        num_positions: wanted; fewer are returned if contexts fill up or little is drafted.

    Returns:
        The distributions at the drafted positions, None without any; and the check of the
        target's KV cache in the first rounds.
    """
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    chosen, found, idle, worst, num_scores = False, 0, 0, 0.0, 0
    dtype = torch.float64
    repeats = num_positions // (4 * max(pair.num_tokens, 1) * len(prompts))
    rows = list(prompts) * max(1, min(repeats, _MAX_ROWS // len(prompts)))
    batch = Batch(pair, rows, 0)
    num_rounds = 0
    while num_rounds < _MIN_ROUNDS or (found < num_positions and idle < _MAX_IDLE_ROUNDS):
        if pair.limit is not None and max(batch.context.lengths) + 2 >= pair.limit:
            break
        before = _tokens(batch.context)
        round_ = batch.step()
        dtype = round_.scores.logits_BNV.dtype
        if num_rounds < _CHECKED_ROUNDS:
            worst = max(worst, _cache_error(pair, before, round_))
            num_scores += int(round_.draft.mask_BN.sum())
        num_rounds += 1
        idle += 1
        if round_.draft.num_nodes > 1 and not round_.verified_by_logits and found < num_positions:
            kept.append(_positions(round_))
            chosen = round_.draft.probs_BNV is None
            found += len(kept[-1][2])
            idle = 0
    allowed, name = _ALLOWED[dtype], str(dtype).removeprefix("torch.")
    if not num_scores:
        return None, Check.skipped(STATES, "the prompts leave no room for a round")
    states = Check(
        STATES,
        worst <= allowed,
        worst,
        f"TV between the target's distributions in a round and from scratch, {num_scores} nodes; "
        f"allowed {allowed:g} in {name}",
        f"in {name} the target's distribution varies by {worst:.2g} with the forward pass's shape"
        if worst > _REPORTED
        else "",
    )
    if not found:
        return None, states
    p_KV, q_KV, x_K = (torch.cat(parts)[:num_positions] for parts in zip(*kept, strict=True))
    return DraftedPositions(p_KV, q_KV, x_K, chosen), states


def _positions(round_: Round) -> tuple[Tensor, Tensor, Tensor]:
    """p, q and the candidate for the first child of every node that has one."""
    draft = round_.draft
    parents_BD = draft.parents_BN[:, 1:]
    same_BDD = parents_BD[:, :, None] == parents_BD[:, None]
    first_BD = draft.mask_BN[:, 1:] & ~(same_BDD & draft.mask_BN[:, None, 1:]).tril(-1).any(2)
    rows_K, child_K = first_BD.nonzero(as_tuple=True)
    parent_K, x_K = parents_BD[rows_K, child_K], draft.tokens_BN[rows_K, child_K + 1]
    p_KV = round_.p_BNV[rows_K, parent_K]
    if draft.probs_BNV is None:
        q_KV = torch.zeros_like(p_KV).scatter_(1, x_K[:, None], 1.0)
    else:
        q_KV = draft.probs_BNV[rows_K, parent_K]
    return on_float64_device(p_KV), on_float64_device(q_KV), on_float64_device(x_K)


def _cache_error(pair: Pair, before: list[list[int]], round_: Round) -> float:
    """The largest TV between a round's softmax and the softmax of passes from scratch.

    All rows are scored again on a fresh cache. Each path of the first row is also scored alone.
    """
    draft = round_.draft
    context = pair.context(before, 0)
    fresh_BNV = pair.target.score(pair.target.start(context), draft).logits_BNV
    pairs = [(round_.scores.logits_BNV[draft.mask_BN], fresh_BNV[draft.mask_BN])]
    paths = [_path(before[0], draft, i) for i in range(draft.num_nodes) if draft.mask_BN[0, i]]
    alone = pair.context(paths, 0)
    root = Draft.root_only(alone.root_B)
    alone_NV = pair.target.score(pair.target.start(alone), root).logits_BNV[:, 0]
    pairs.append((round_.scores.logits_BNV[0][draft.mask_BN[0]], alone_NV))
    distributions = [
        (on_float64_device(a).double().softmax(-1), on_float64_device(b).double().softmax(-1))
        for a, b in pairs
    ]
    return max(float(divergence("tv", a, b).max()) for a, b in distributions)


def _path(committed: list[int], draft: Draft, node: int) -> list[int]:
    drafted_N: Tensor = draft.tokens_BN[0][draft.ancestors_BNN[0, node]]
    return committed + [int(token) for token in drafted_N[1:]]


def _tokens(context: Context) -> list[list[int]]:
    rows = context.tokens_BT.tolist()
    return [row[:length] for row, length in zip(rows, context.lengths, strict=True)]
