"""Lifts a node-local verification rule to batches, chains and trees.

A node-local rule decides about one candidate at one position: whether it is accepted and, if not,
which distribution remains. :func:`walk` starts at the root's first child. It descends where a
candidate is accepted, moves on to the next sibling with the remaining distribution where it is
rejected, and finally draws the next token from the distribution that remains. With rejection
sampling as the rule and one child per node, this is Leviathan's Algorithm 1; with several i.i.d.
children it is SpecInfer's multi-step speculative sampling (Miao et al., Algorithm 2).

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.chain import cached_arange, chain_tensors
from outrider.core.draft import Draft, Verdict
from outrider.core.draw import draw
from outrider.core.errors import IncompatibleError
from outrider.core.loop_operator import LoopState
from outrider.core.protocols import NodeDistributions
from outrider.core.recording import is_recorded
from outrider.core.reductions import any_of
from outrider.core.repeat import apply_if, repeat_while
from outrider.core.rng import Role, Stream

LOOPS_FROM = 4096
"""The size of a vocabulary from which a program reads which distributions a walk needs. Each step
of a program's loop takes some microseconds, in which smaller distributions are computed."""


class NodeRule(Protocol):
    """A rule that verifies one candidate at one position. Leading dimensions broadcast."""

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """Whether candidate x is accepted, given the uniform number u (bool, shape of x).

        ``q_V`` is the distribution that x was drawn from. None means that x was chosen by a
        deterministic rule, so its distribution is the point mass at x.
        """

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What remains after x was rejected: the target's remaining weights (normalised or not),
        and the distribution that the next sibling was drawn from."""


class ClosedFormRule(NodeRule, Protocol):
    """A node-local rule whose acceptance probabilities have a closed form."""

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """The probability that each token is accepted if it is the candidate, shape of ``p_V``."""


def output_distribution(rule: ClosedFormRule, p_V: Tensor, q_V: Tensor) -> Tensor:
    """The output distribution π at a position with one candidate x drawn from q.

        π(x) = q(x) r(x) + (1 - Σ q r) s(x)

    with r the rule's acceptance probability and s the distribution that remains after a rejection.
    Leading dimensions broadcast. For a chosen candidate, pass the point mass as q.
    """
    r_V = rule.acceptance(p_V, q_V)
    accepted_V = q_V * r_V
    rejected = (q_V * (1 - r_V)).sum(-1, keepdim=True)
    left_V, _ = rule.reject(p_V, q_V, q_V.argmax(-1))
    return accepted_V + rejected * _normalise(_or_target(left_V, p_V))


def walk(rule: NodeRule, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
    """Verifies a draft by a node-local rule: chains by the fast form, trees by the general one."""
    return (
        walk_chain(rule, draft, p_BNV, rng)
        if draft.is_chain
        else walk_tree(rule, draft, p_BNV, rng)
    )


def require_chain(rule: object, draft: Draft) -> None:
    """Raises IncompatibleError when the draft has branches."""
    if not draft.is_chain:
        name = type(rule).__name__
        raise IncompatibleError(f"{name} verifies a single path: use it with chains, not trees")


def walk_chain(rule: NodeRule, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
    """Verifies all candidates of all rows at once, then computes the remaining distribution only
    where each row stops."""
    B, N = draft.tokens_BN.shape
    D = N - 1
    u_next_B = rng.uniform(Role.NEXT, 1)[:, 0]
    if D == 0:
        none_B0 = draft.tokens_BN[:, :0]
        none_B = torch.zeros(B, dtype=torch.int64, device=p_BNV.device)
        return Verdict(none_B0, none_B, draw(p_BNV[:, 0], u_next_B))
    x_BD = draft.tokens_BN[:, 1:]
    q_BDV = None if draft.probs_BNV is None else draft.probs_BNV[:, :-1]
    accepted_BD = rule.accept(p_BNV[:, :-1], q_BDV, x_BD, rng.uniform(Role.ACCEPT, D))
    if not draft.is_full:
        accepted_BD = accepted_BD & draft.mask_BN[:, 1:]
    num_accepted_B = accepted_BD.cumprod(1).sum(1)

    p_BV = at_node(p_BNV, num_accepted_B)
    stop_B = num_accepted_B.clamp(max=D - 1)
    q_BV = None if draft.probs_BNV is None else at_node(draft.probs_BNV, stop_B)
    left_BV, _ = rule.reject(p_BV, q_BV, x_BD.gather(1, stop_B[:, None])[:, 0])
    rejected_B = num_accepted_B < draft.num_drafted_B
    from_left_B = rejected_B & (left_BV.sum(-1) > 0)  # rounding may leave no mass
    probs_BV = torch.where(from_left_B[:, None], left_BV, p_BV)
    path_BD = chain_tensors(B, N, p_BNV.device).path_BD
    return Verdict(path_BD, num_accepted_B, draw(probs_BV, u_next_B))


def walk_tree(rule: NodeRule, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
    """Verifies trees whose target distributions are known at all nodes: see :func:`walk_down`."""
    return walk_down(rule, draft, partial(at_node, p_BNV), rng)


def walk_down(rule: NodeRule, draft: Draft, p_at: NodeDistributions, rng: Stream) -> Verdict:
    """Each row verifies the children of its current node in index order and descends where one is
    accepted. The number of steps is that of the longest walk, not the number of nodes, and only the
    distributions of the nodes that a row descends to are asked for.

    Devices other than a CPU, and programs for small vocabularies, take each step that a walk can
    have and each part of it: reading whether it is needed would cost more.
    """
    B, N = draft.tokens_BN.shape
    u_BN = torch.nn.functional.pad(rng.uniform(Role.ACCEPT, max(N - 1, 1)), (1, 0))
    node_N = torch.arange(N, device=draft.tokens_BN.device)
    parents_BN = torch.where(draft.mask_BN, draft.parents_BN, -1)
    root_B = torch.zeros(B, dtype=torch.int64, device=draft.tokens_BN.device)
    p_BV, q_BNV = p_at(root_B), draft.probs_BNV
    loops = p_BV.device.type == "cpu"
    if is_recorded():
        loops = loops and p_BV.shape[1] >= LOOPS_FROM
    when = apply_if if loops else _apply

    def child_of(node_B: Tensor, last_B: Tensor) -> tuple[Tensor, Tensor]:
        """Whether a node has a child after the last one verified, and the first of them."""
        is_next_BN = (parents_BN == node_B[:, None]) & (node_N > last_B[:, None])
        return any_of(is_next_BN), is_next_BN.int().argmax(1)

    def some_row_goes_on(reaches_B: Tensor, *_: Tensor) -> Tensor:
        return any_of(reaches_B)

    def verify(
        reaches_B: Tensor, child_B: Tensor, node_B: Tensor, p_BV: Tensor, *q: Tensor
    ) -> LoopState:
        x_B = draft.tokens_BN.gather(1, child_B[:, None])[:, 0]
        u_B = u_BN.gather(1, child_B[:, None])[:, 0]
        accepted_B = reaches_B & rule.accept(p_BV, q[0] if q else None, x_B, u_B)
        rejected_B = reaches_B & ~accepted_B

        def stay(p_BV: Tensor, *q: Tensor) -> LoopState:
            left_BV, left_q_BV = rule.reject(p_BV, q[0] if q else None, x_B)
            mass_B1 = left_BV.sum(-1, keepdim=True)
            left_BV = torch.where(mass_B1 > 0, left_BV / mass_B1, p_BV)  # rounding may leave none
            left = left_BV, *(() if left_q_BV is None else (left_q_BV,))
            return _chosen(rejected_B, left, (p_BV, *q))

        def descend(p_BV: Tensor, *q: Tensor) -> LoopState:
            below = p_at(child_B), *(() if q_BNV is None else (at_node(q_BNV, child_B),))
            return _chosen(accepted_B, below, (p_BV, *q))

        distributions = when(any_of(rejected_B), stay, (p_BV, *q))
        distributions = when(any_of(accepted_B), descend, distributions)
        node_B = torch.where(accepted_B, child_B, node_B)
        reaches_next_B, next_B = child_of(node_B, child_B)
        return reaches_B & reaches_next_B, next_B, node_B, *distributions

    q = () if q_BNV is None else (at_node(q_BNV, root_B),)
    state: LoopState = (*child_of(root_B, root_B), root_B, p_BV, *q)
    if loops:
        state = repeat_while(some_row_goes_on, verify, state, at_most=draft.walk_length_bound)
    else:
        for _ in range(draft.walk_length_bound):
            state = verify(*state)
    _, _, node_B, p_BV, *_ = state
    num_accepted_B = draft.depth_BN.gather(1, node_B[:, None])[:, 0]
    next_B = draw(p_BV, rng.uniform(Role.NEXT, 1)[:, 0])
    return Verdict(path_to(draft, node_B), num_accepted_B, next_B)


def _apply(_: Tensor, step: Callable[..., LoopState], state: LoopState) -> LoopState:
    return step(*state)


def _chosen(rows_B: Tensor, there: LoopState, elsewhere: LoopState) -> LoopState:
    """Distributions of these rows, and those of the others; what is not there stays."""
    pairs = zip(there, elsewhere, strict=False)
    chosen = tuple(torch.where(rows_B[:, None], one_BV, other_BV) for one_BV, other_BV in pairs)
    return *chosen, *elsewhere[len(there) :]


def path_to(draft: Draft, node_B: Tensor) -> Tensor:
    """The nodes from the root's child down to ``node``, padded with node N-1, shape (B, D)."""
    B, N = draft.tokens_BN.shape
    rows_B = torch.arange(B, device=node_B.device)
    on_path_BN = draft.ancestors_BNN[rows_B, node_B]
    node_BN = torch.arange(N, device=node_B.device).expand(B, N)
    ordered_BN = torch.where(on_path_BN, node_BN, N).sort(1).values
    return ordered_BN[:, 1:].clamp(max=N - 1)


def at_node(probs_BNV: Tensor, node_B: Tensor) -> Tensor:
    """The distribution at one node of each row, (B, V)."""
    B, N, _ = probs_BNV.shape
    index_B = node_B if B == 1 else node_B + cached_arange(B, probs_BNV.device, N)
    return probs_BNV.flatten(0, 1).index_select(0, index_B)


def _or_target(left_BV: Tensor, p_BV: Tensor) -> Tensor:
    """The remaining weights, or the target distribution where rounding has left no mass."""
    return torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV)


def _normalise(weights_BV: Tensor) -> Tensor:
    return weights_BV / weights_BV.sum(-1, keepdim=True)
