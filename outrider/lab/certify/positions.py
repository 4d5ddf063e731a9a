"""Single places: the distribution that the rule emits there, in closed form, against the target's.

Legend: K places, V vocabulary, S probed tokens, C classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core import Bound, Divergence, Drawn, Verifier, output_distribution
from outrider.core.divergences import divergences
from outrider.lab.certify.pair import blaming_the_rule
from outrider.lab.certify.report import Check, rounded_up

NAME = "positions"
_CLASSES = 32  # a rule without closed form sees distributions of so many tokens
_PROBES = 16
_ROUNDINGS = 100  # TV allowed to a lossless rule, in rounding steps of the distributions' dtype
_SLACK = {torch.float64: 1e-9}  # of a divergence against its bound; else 1e-4


@dataclass(frozen=True)
class Places:
    """Distributions that met at drafted places.

    Attributes:
        p_KV: the target's.
        q_KV: the draft's; the point mass where the candidate was chosen.
        x_K: the candidate.
        chosen: whether candidates were chosen, not drawn.
    """

    p_KV: Tensor
    q_KV: Tensor
    x_K: Tensor
    chosen: bool

    @property
    def number(self) -> int:
        return len(self.x_K)


def check(verifier: Verifier, drawn: Drawn, places: Places | None) -> Check:
    """The emitted distribution at every place; for a lossy rule, its divergence against the
    bound."""
    if places is None:
        return Check.skipped(
            NAME, "no distributions met: nothing is drafted, or no distribution is computed"
        )
    if drawn == "searched":
        return Check.skipped(
            NAME, "candidates are searched: they have no distribution of their own"
        )
    if not (hasattr(verifier, "accept") and hasattr(verifier, "reject")):
        return Check.skipped(NAME, "the rule does not verify place by place; see rounds")
    rule: Any = verifier
    closed = hasattr(rule, "acceptance")
    allowed = _ROUNDINGS * torch.finfo(places.p_KV.dtype).eps
    if not closed:
        places = coarsened(places, _CLASSES)
    p_KV = places.p_KV
    with blaming_the_rule():
        pi_KV = _closed(rule, places) if closed else _bisected(rule, places)
        broken = _probe(rule, places, closed) if verifier.lossless else ""
    where = f"{places.number} places"
    where += "" if closed else f", distributions coarsened to {p_KV.shape[1]} tokens"
    if not verifier.lossless:
        return held(NAME, verifier.bound, p_KV, pi_KV, f"per position, {where}")
    tv_K = divergence("tv", p_KV, pi_KV)
    worst = float(tv_K.max())
    words = f"TV per position, {where}; allowed {allowed:.2g}"
    if broken:
        return Check(NAME, False, worst, broken)
    claim = f"TV per position ≤ {rounded_up(worst)} exactly"
    return Check(NAME, worst <= allowed, worst, words, claim)


def held(name: str, bound: Bound, p_KV: Tensor, pi_KV: Tensor, where: str) -> Check:
    """A lossy rule's divergence against its bound."""
    kind: Divergence = bound.divergence or "tv"
    D_K = divergence(kind, p_KV, pi_KV)
    worst = float(D_K.max())
    words = f"{_SYMBOL[kind]} {where}, mean {float(D_K.mean()):.2g}"
    claim = f"{_SYMBOL[kind]} of {name} reached {worst:.4g}"
    if bound.per_token is None or bound.divergence is None:
        return Check(name, None, worst, f"{words}; no divergence is bounded", claim)
    slack = _SLACK.get(p_KV.dtype, 1e-4)
    ok = worst <= bound.per_token * (1 + slack) + slack
    claim += f" of {bound.per_token:.4g} allowed"
    return Check(name, ok, worst, f"{words}; bound {bound.per_token:.4g}", claim)


_SYMBOL = {"kl": "KL(p‖π)", "rkl": "KL(π‖p)", "tv": "TV", "chi2": "χ²"}


def divergence(kind: Divergence, p_KV: Tensor, pi_KV: Tensor) -> Tensor:
    """Between rows, in float64; see ``core.Divergence``."""
    found: Tensor = getattr(divergences(p_KV, pi_KV), kind)
    return found


def coarsened(places: Places, num_classes: int) -> Places:
    """The distributions on the most probable tokens of either model and one class for the rest.

    The same classes for p and q of a place; in float64, normalised.
    """
    V = places.p_KV.shape[1]
    p_KV, q_KV = places.p_KV.double(), places.q_KV.double()
    top_KC = torch.maximum(p_KV, q_KV).topk(min(num_classes, V) - 1).indices
    if places.chosen:  # the candidate keeps a class of its own
        has_K = (top_KC == places.x_K[:, None]).any(1)
        top_KC[:, -1] = torch.where(has_K, top_KC[:, -1], places.x_K)

    def coarse(probs_KV: Tensor) -> Tensor:
        probs_KC = probs_KV.gather(1, top_KC)
        rest_K1 = probs_KV.scatter(1, top_KC, 0.0).sum(1, keepdim=True)
        probs_KC = torch.cat([probs_KC, rest_K1], 1)
        return probs_KC / probs_KC.sum(1, keepdim=True)

    same_KC = top_KC == places.x_K[:, None]
    x_K = torch.where(same_KC.any(1), same_KC.int().argmax(1), top_KC.shape[1])
    return Places(coarse(p_KV), coarse(q_KV), x_K, places.chosen)


def _closed(rule: Any, places: Places) -> Tensor:
    if not places.chosen:
        return output_distribution(rule, places.p_KV, places.q_KV)
    p_KV, x_K1 = places.p_KV, places.x_K[:, None]
    r_K1 = rule.acceptance(p_KV, places.q_KV).gather(1, x_K1)
    left_KV, _ = rule.reject(p_KV, None, places.x_K)
    return ((1 - r_K1) * _distribution(left_KV, p_KV)).scatter_add(1, x_K1, r_K1.to(p_KV.dtype))


def _bisected(rule: Any, places: Places) -> Tensor:
    """The same when acceptance probabilities have to be found out: by bisection on u."""
    p_KV, q_KV = places.p_KV, places.q_KV
    K, V = p_KV.shape
    if places.chosen:
        x_KS = places.x_K[:, None]
    else:
        x_KS = torch.arange(V, device=p_KV.device).expand(K, V)
    p_KSV = p_KV[:, None].expand(*x_KS.shape, V)
    q_KSV = None if places.chosen else q_KV[:, None].expand(*x_KS.shape, V)
    low_KS = torch.zeros(x_KS.shape, dtype=torch.float64, device=p_KV.device)
    high_KS = torch.ones_like(low_KS)
    for _ in range(54):  # accepted below low, refused from high on
        middle_KS = (low_KS + high_KS) / 2
        ok_KS = rule.accept(p_KSV, q_KSV, x_KS, middle_KS.clamp(max=1 - 2.0**-52))
        low_KS = torch.where(ok_KS, middle_KS, low_KS)
        high_KS = torch.where(ok_KS, high_KS, middle_KS)
    r_KS = (low_KS + high_KS) / 2
    mass_KS = torch.ones_like(r_KS) if places.chosen else q_KV
    taken_KV = torch.zeros_like(p_KV).scatter_add(1, x_KS, mass_KS * r_KS)
    left_KV, _ = rule.reject(p_KV, None if places.chosen else q_KV, places.x_K)
    return taken_KV + (mass_KS * (1 - r_KS)).sum(1, keepdim=True) * _distribution(left_KV, p_KV)


def _probe(rule: Any, places: Places, closed: bool) -> str:
    """What ``accept`` does otherwise than it should, in words; empty if nothing."""
    p_KV, q_KV = places.p_KV, places.q_KV
    V = p_KV.shape[1]
    if places.chosen:
        x_KS = places.x_K[:, None]
    else:
        u_KS = torch.arange(1, _PROBES + 1, device=p_KV.device).double() / (_PROBES + 1)
        cdf_KV = q_KV.double().cumsum(1)
        goal_KS = (u_KS * cdf_KV[:, -1:]).contiguous()
        x_KS = torch.searchsorted(cdf_KV, goal_KS, right=True).clamp(max=V - 1)
    p_KSV = p_KV[:, None].expand(*x_KS.shape, V)
    q_KSV = None if places.chosen else q_KV[:, None].expand(*x_KS.shape, V)
    zero_KS = torch.zeros(x_KS.shape, dtype=torch.float64, device=p_KV.device)
    if closed:
        r_KS = rule.acceptance(p_KV, q_KV).gather(1, x_KS).double()
        step = _ROUNDINGS * torch.finfo(p_KV.dtype).eps
        below_KS = r_KS * (1 - step)
        ok_KS = rule.accept(p_KSV, q_KSV, x_KS, below_KS) | (below_KS == 0)
        over_KS = (r_KS * (1 + step)).clamp(max=1 - 2.0**-52)
        bad_KS = rule.accept(p_KSV, q_KSV, x_KS, over_KS) & (over_KS > r_KS)
        if not bool((ok_KS & ~bad_KS).all()):
            return "accept and acceptance disagree about the probability of acceptance"
    for s in range(x_KS.shape[1]):  # x made impossible, u = 0
        x_K = x_KS[:, s]
        without_KV = p_KV.scatter(1, x_K[:, None], 0.0)
        possible_K = without_KV.sum(1) > 0
        taken_K = rule.accept(without_KV, None if places.chosen else q_KV, x_K, zero_KS[:, s])
        if bool((taken_K & possible_K).any()):
            return "at u = 0, a token is accepted that the target never emits"
    return ""


def _distribution(left_KV: Tensor, p_KV: Tensor) -> Tensor:
    left_KV = torch.where(left_KV.sum(-1, keepdim=True) > 0, left_KV, p_KV)
    return left_KV / left_KV.sum(-1, keepdim=True)
