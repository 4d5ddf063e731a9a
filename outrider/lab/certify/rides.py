"""Real rounds of the pair: the distributions that meet there, and whether the target's state stays
right.

Legend: B rows, N nodes, D drafted nodes (N-1), K places, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core import Context, Draft, Round
from outrider.lab.certify.pair import Batch, Pair, able
from outrider.lab.certify.positions import Places, divergence
from outrider.lab.certify.report import Check

_STATES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}
STATES = "states"
_VISIBLE = 1e-4  # rounding of the target that the verdict has to mention
_MOST_ROWS = 32
_CHECKED, _LEAST, _IDLE = 4, 4, 8  # rounds whose states are checked; at least; without a draft


def sample(
    pair: Pair, prompts: Sequence[Sequence[int]], num_places: int
) -> tuple[Places | None, Check]:
    """Real rounds from each prompt until there are enough places; the state check on the way."""
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    chosen, found, idle, worst, num_scores = False, 0, 0, 0.0, 0
    dtype = torch.float64
    repeats = num_places // (4 * max(pair.num_tokens, 1) * len(prompts))
    rows = list(prompts) * max(1, min(repeats, _MOST_ROWS // len(prompts)))
    batch = Batch(pair, rows, 0)
    turns = 0
    while turns < _LEAST or (found < num_places and idle < _IDLE):
        if pair.limit is not None and max(batch.context.lengths) + 2 >= pair.limit:
            break
        before = _tokens(batch.context)
        round_ = batch.step()
        dtype = round_.scores.logits_BNV.dtype
        if turns < _CHECKED:
            worst = max(worst, _stale(pair, before, round_))
            num_scores += int(round_.draft.mask_BN.sum())
        turns += 1
        idle += 1
        if round_.draft.num_nodes > 1 and not round_.verified_by_logits and found < num_places:
            kept.append(_places(round_))
            chosen = round_.draft.probs_BNV is None
            found += len(kept[-1][2])
            idle = 0
    allowed, name = _STATES[dtype], str(dtype).removeprefix("torch.")
    if not num_scores:
        return None, Check.skipped(STATES, "the prompts leave no room for a round")
    states = Check(
        STATES,
        worst <= allowed,
        worst,
        f"TV of the target's distributions in a round from those from scratch, {num_scores} nodes; "
        f"allowed {allowed:g} in {name}",
        f"in {name} the target's own distribution moves by {worst:.2g} with the shape of a pass"
        if worst > _VISIBLE
        else "",
    )
    if not found:
        return None, states
    p_KV, q_KV, x_K = (torch.cat(parts)[:num_places] for parts in zip(*kept, strict=True))
    return Places(p_KV, q_KV, x_K, chosen), states


def _places(round_: Round) -> tuple[Tensor, Tensor, Tensor]:
    """The first child of every node that has one."""
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
    return able(p_KV), able(q_KV), able(x_K)


def _stale(pair: Pair, before: list[list[int]], round_: Round) -> float:
    """The largest TV of a round's softmax from that of a pass over a fresh cache, and, for the
    first row, from passes over each path on its own."""
    draft = round_.draft
    context = pair.context(before, 0)
    fresh_BNV = pair.target.score(pair.target.start(context), draft).logits_BNV
    pairs = [(round_.scores.logits_BNV[draft.mask_BN], fresh_BNV[draft.mask_BN])]
    paths = [_path(before[0], draft, i) for i in range(draft.num_nodes) if draft.mask_BN[0, i]]
    alone = pair.context(paths, 0)
    root = Draft.root_only(alone.root_B)
    alone_NV = pair.target.score(pair.target.start(alone), root).logits_BNV[:, 0]
    pairs.append((round_.scores.logits_BNV[0][draft.mask_BN[0]], alone_NV))
    distributions = [(able(a).double().softmax(-1), able(b).double().softmax(-1)) for a, b in pairs]
    return max(float(divergence("tv", a, b).max()) for a, b in distributions)


def _path(committed: list[int], draft: Draft, node: int) -> list[int]:
    drafted_N: Tensor = draft.tokens_BN[0][draft.ancestors_BNN[0, node]]
    return committed + [int(token) for token in drafted_N[1:]]


def _tokens(context: Context) -> list[list[int]]:
    rows = context.tokens_BT.tolist()
    return [row[:length] for row, length in zip(rows, context.lengths, strict=True)]
