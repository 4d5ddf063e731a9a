"""The check of single positions: the distribution that the rule emits against the target's.

The emitted distribution is worked out in closed form at drafted positions of real rounds.

Legend: K positions, V vocabulary, S probed tokens, C classes of tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core import Bound, Divergence, Drawn, Verifier, output_distribution
from outrider.core.divergences import divergences
from outrider.lab.certify.pair import wrapped_rule_errors
from outrider.lab.certify.report import Check, rounded_up

NAME = "positions"
_CLASSES = 32  # for a rule without closed form, distributions are coarsened to this many tokens
_PROBES = 16  # candidates per position for which ``accept`` is called
_ROUNDINGS = 100  # TV allowed to a lossless rule, in rounding steps of the distributions' dtype
_SLACK = {torch.float64: 1e-9}  # by which a divergence may exceed its bound; 1e-4 in other dtypes


@dataclass(frozen=True)
class DraftedPositions:
    """Target and draft distributions at drafted positions.

    Attributes:
        p_KV: the target's distributions.
        q_KV: the draft's distributions; a point mass where the candidate was chosen.
        x_K: the drafted candidates.
        chosen: whether candidates were chosen, not drawn.
    """

    p_KV: Tensor
    q_KV: Tensor
    x_K: Tensor
    chosen: bool

    @property
    def number(self) -> int:
        return len(self.x_K)


def check(verifier: Verifier, drawn: Drawn, positions: DraftedPositions | None) -> Check:
    """Compares the emitted distribution with the target's at every position.

    For a lossy rule, compares the divergence between the two with the rule's bound.

    Args:
        verifier: the rule.
        drawn: how the candidates were obtained.
        positions: distributions of real rounds; None if there are none.
    """
    if positions is None:
        return Check.skipped(NAME, "nothing is drafted, or the rounds compute no distributions")
    if drawn == "searched":
        return Check.skipped(
            NAME, "candidates are searched: they have no distribution of their own"
        )
    if not (hasattr(verifier, "accept") and hasattr(verifier, "reject")):
        return Check.skipped(NAME, "the rule does not verify position by position; see rounds")
    rule: Any = verifier
    closed_form = hasattr(rule, "acceptance")
    allowed = _ROUNDINGS * torch.finfo(positions.p_KV.dtype).eps
    if not closed_form:
        positions = coarsened(positions, _CLASSES)
    p_KV = positions.p_KV
    with wrapped_rule_errors():
        pi_KV = _closed_form(rule, positions) if closed_form else _bisected(rule, positions)
        contradiction = _contradiction(rule, positions, closed_form) if verifier.lossless else ""
    where = f"{positions.number} positions"
    where += "" if closed_form else f", distributions coarsened to {p_KV.shape[1]} tokens"
    if not verifier.lossless:
        return check_bound(NAME, verifier.bound, p_KV, pi_KV, f"per position, {where}")
    tv_K = divergence("tv", p_KV, pi_KV)
    worst = float(tv_K.max())
    words = f"TV per position, {where}; allowed {allowed:.2g}"
    if contradiction:
        return Check(NAME, False, worst, contradiction)
    claim = f"TV per position ≤ {rounded_up(worst)} exactly"
    return Check(NAME, worst <= allowed, worst, words, claim)


def check_bound(name: str, bound: Bound, p_KV: Tensor, pi_KV: Tensor, where: str) -> Check:
    """Compares a lossy rule's largest divergence with its bound per token.

    Args:
        name: of the check.
        bound: what the rule states; without a bounded divergence, the check only reports.
        p_KV: the target's distributions.
        pi_KV: the emitted distributions.
        where: what the rows are, for the report.
    """
    kind: Divergence = bound.divergence or "tv"
    D_K = divergence(kind, p_KV, pi_KV)
    worst = float(D_K.max())
    words = f"{_SYMBOL[kind]} {where}, mean {float(D_K.mean()):.2g}"
    claim = f"{_SYMBOL[kind]} of {name} reached {worst:.4g}"
    if bound.per_token is None or bound.divergence is None:
        return Check(name, None, worst, f"{words}; the rule bounds no divergence", claim)
    slack = _SLACK.get(p_KV.dtype, 1e-4)
    ok = worst <= bound.per_token * (1 + slack) + slack
    claim += f" of {bound.per_token:.4g} allowed"
    return Check(name, ok, worst, f"{words}; bound {bound.per_token:.4g}", claim)


_SYMBOL = {"kl": "KL(p‖π)", "rkl": "KL(π‖p)", "tv": "TV", "chi2": "χ²"}


def divergence(kind: Divergence, p_KV: Tensor, pi_KV: Tensor) -> Tensor:
    """The divergence between rows of the same number, (K,), in float64; see ``core.Divergence``."""
    rows_K: Tensor = getattr(divergences(p_KV, pi_KV), kind)
    return rows_K


def coarsened(positions: DraftedPositions, num_classes: int) -> DraftedPositions:
    """Merges all but the most probable tokens of either model into one class.

    p and q of a position have the same classes. The result is float64 and normalised.
    """
    V = positions.p_KV.shape[1]
    p_KV, q_KV = positions.p_KV.double(), positions.q_KV.double()
    top_KC = torch.maximum(p_KV, q_KV).topk(min(num_classes, V) - 1).indices
    if positions.chosen:  # the candidate must keep its own class
        has_K = (top_KC == positions.x_K[:, None]).any(1)
        top_KC[:, -1] = torch.where(has_K, top_KC[:, -1], positions.x_K)

    def coarse(probs_KV: Tensor) -> Tensor:
        probs_KC = probs_KV.gather(1, top_KC)
        rest_K1 = probs_KV.scatter(1, top_KC, 0.0).sum(1, keepdim=True)
        probs_KC = torch.cat([probs_KC, rest_K1], 1)
        return probs_KC / probs_KC.sum(1, keepdim=True)

    same_KC = top_KC == positions.x_K[:, None]
    x_K = torch.where(same_KC.any(1), same_KC.int().argmax(1), top_KC.shape[1])
    return DraftedPositions(coarse(p_KV), coarse(q_KV), x_K, positions.chosen)


def _closed_form(rule: Any, positions: DraftedPositions) -> Tensor:
    """π at every position, from the rule's acceptance probabilities, (K, V)."""
    if not positions.chosen:
        return output_distribution(rule, positions.p_KV, positions.q_KV)
    p_KV, x_K1 = positions.p_KV, positions.x_K[:, None]
    r_K1 = rule.acceptance(p_KV, positions.q_KV).gather(1, x_K1)
    left_KV, _ = rule.reject(p_KV, None, positions.x_K)
    return ((1 - r_K1) * _distribution(left_KV, p_KV)).scatter_add(1, x_K1, r_K1.to(p_KV.dtype))


def _bisected(rule: Any, positions: DraftedPositions) -> Tensor:
    """π at every position for a rule without ``acceptance``: bisects the uniform number u.

    The acceptance probability of a candidate is the u from which on ``accept`` is false.
    """
    p_KV, q_KV = positions.p_KV, positions.q_KV
    K, V = p_KV.shape
    if positions.chosen:
        x_KS = positions.x_K[:, None]
    else:
        x_KS = torch.arange(V, device=p_KV.device).expand(K, V)
    p_KSV = p_KV[:, None].expand(*x_KS.shape, V)
    q_KSV = None if positions.chosen else q_KV[:, None].expand(*x_KS.shape, V)
    low_KS = torch.zeros(x_KS.shape, dtype=torch.float64, device=p_KV.device)
    high_KS = torch.ones_like(low_KS)
    for _ in range(54):  # accepted below low, rejected from high on
        middle_KS = (low_KS + high_KS) / 2
        ok_KS = rule.accept(p_KSV, q_KSV, x_KS, middle_KS.clamp(max=1 - 2.0**-52))
        low_KS = torch.where(ok_KS, middle_KS, low_KS)
        high_KS = torch.where(ok_KS, high_KS, middle_KS)
    r_KS = (low_KS + high_KS) / 2
    mass_KS = torch.ones_like(r_KS) if positions.chosen else q_KV
    taken_KV = torch.zeros_like(p_KV).scatter_add(1, x_KS, mass_KS * r_KS)
    left_KV, _ = rule.reject(p_KV, None if positions.chosen else q_KV, positions.x_K)
    return taken_KV + (mass_KS * (1 - r_KS)).sum(1, keepdim=True) * _distribution(left_KV, p_KV)


def _contradiction(rule: Any, positions: DraftedPositions, closed_form: bool) -> str:
    """Calls ``accept`` and describes the first contradiction found; empty if there is none."""
    p_KV, q_KV = positions.p_KV, positions.q_KV
    V = p_KV.shape[1]
    if positions.chosen:
        x_KS = positions.x_K[:, None]
    else:
        u_KS = torch.arange(1, _PROBES + 1, device=p_KV.device).double() / (_PROBES + 1)
        cdf_KV = q_KV.double().cumsum(1)
        goal_KS = (u_KS * cdf_KV[:, -1:]).contiguous()
        x_KS = torch.searchsorted(cdf_KV, goal_KS, right=True).clamp(max=V - 1)
    p_KSV = p_KV[:, None].expand(*x_KS.shape, V)
    q_KSV = None if positions.chosen else q_KV[:, None].expand(*x_KS.shape, V)
    zero_KS = torch.zeros(x_KS.shape, dtype=torch.float64, device=p_KV.device)
    if closed_form:
        r_KS = rule.acceptance(p_KV, q_KV).gather(1, x_KS).double()
        step = _ROUNDINGS * torch.finfo(p_KV.dtype).eps
        below_KS = r_KS * (1 - step)
        ok_KS = rule.accept(p_KSV, q_KSV, x_KS, below_KS) | (below_KS == 0)
        over_KS = (r_KS * (1 + step)).clamp(max=1 - 2.0**-52)
        bad_KS = rule.accept(p_KSV, q_KSV, x_KS, over_KS) & (over_KS > r_KS)
        if not bool((ok_KS & ~bad_KS).all()):
            return "accept and acceptance disagree about the probability of acceptance"
    for s in range(x_KS.shape[1]):  # remove candidate x from p; u = 0 must not accept it
        x_K = x_KS[:, s]
        without_KV = p_KV.scatter(1, x_K[:, None], 0.0)
        possible_K = without_KV.sum(1) > 0
        taken_K = rule.accept(without_KV, None if positions.chosen else q_KV, x_K, zero_KS[:, s])
        if bool((taken_K & possible_K).any()):
            return "at u = 0, a token is accepted that the target never emits"
    return ""


def _distribution(left_KV: Tensor, p_KV: Tensor) -> Tensor:
    """Residual weights, normalised; p where no weight is left."""
    left_KV = torch.where(left_KV.sum(-1, keepdim=True) > 0, left_KV, p_KV)
    return left_KV / left_KV.sum(-1, keepdim=True)
