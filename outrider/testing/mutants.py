"""MUT: wrong implementations that the checks must reject, most of them found in public code.

A test that accepts wrong programs proves nothing. Each class here has exactly one error, and the
test suite records which check rejects it. ``Reference`` and ``WithoutReplacement`` are correct:
they are the controls, defined here so that the kit does not depend on the methods that it verifies.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core import (
    LOSSLESS,
    Budget,
    Context,
    Draft,
    Drawn,
    Needs,
    Role,
    Stream,
    Verdict,
    draw,
    path_to,
    walk,
)
from outrider.testing.toy import ToyCache, ToyDrafter, ToyModel, last_accepted

# --------------------------------------------------------------------------------- the controls


class Reference:
    """Right: speculative sampling, iterated over siblings (Leviathan et al.; Miao et al.)."""

    lossless = True
    accepts: frozenset[Drawn] = frozenset({"iid", "chosen"})
    needs: Needs = "distribution"
    bound = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        return walk(self, draft, p_BNV, rng)

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        return u * _at(q_V, x) < _at(p_V, x)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if q_V is None:
            return p_V.scatter(-1, x[..., None], 0.0), None
        return (p_V - q_V).clamp(min=0), q_V


class WithoutReplacement(Reference):
    """Right: a rejected sibling is also removed from the draft distribution, which is renormalised
    (Sequoia, MCSD)."""

    accepts: frozenset[Drawn] = frozenset({"distinct"})

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        assert q_V is not None
        left_V = q_V.scatter(-1, x[..., None], 0.0)
        total = left_V.sum(-1, keepdim=True)
        return (p_V - q_V).clamp(min=0), left_V / total.where(total > 0, 1.0)


# ------------------------------------------------------------------------------ wrong verifiers


class ResidualFromTarget(Reference):
    """Wrong: samples from p after a rejection, not from ``(p - q)+``."""

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return p_V, q_V


class NonStrict(Reference):
    """Wrong: ``u q <= p`` accepts a token of target probability zero at u = 0."""

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        return u * _at(q_V, x) <= _at(p_V, x)


class ShiftedDraftDistribution(Reference):
    """Wrong: verifies a token with the draft distribution of the preceding position."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        if draft.probs_BNV is not None:
            draft = replace(draft, probs_BNV=draft.probs_BNV.roll(1, 1))
        return super().__call__(draft, p_BNV, rng)


class Reseeded(Reference):
    """Wrong: one u for all positions, as if the generator were seeded inside the loop."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        return super().__call__(draft, p_BNV, _OneNumber(rng.key_B, rng.position_B, rng))


class BonusOmitted(Reference):
    """Wrong: no token after a fully accepted draft. The distribution is right, but each round emits
    one token too few."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        verdict = super().__call__(draft, p_BNV, rng)
        last_B = last_accepted(verdict)
        token_B = draft.tokens_BN.gather(1, last_B[:, None])[:, 0]
        full_B = _is_leaf(draft, last_B) & (verdict.num_accepted_B > 0)
        return Verdict(
            verdict.path_BD,
            verdict.num_accepted_B - full_B.long(),
            torch.where(full_B, token_B, verdict.next_token_B),
        )


class BonusFromResidual(Reference):
    """Wrong: after full acceptance the bonus token is drawn from ``(p - q)+``, not from p."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        verdict = super().__call__(draft, p_BNV, rng)
        if draft.probs_BNV is None:
            return verdict
        last_B = last_accepted(verdict)
        rows_B = torch.arange(last_B.shape[0])
        p_BV = p_BNV[rows_B, last_B]
        residual_BV = (p_BV - draft.probs_BNV[rows_B, last_B]).clamp(min=0)
        residual_BV = residual_BV.where(residual_BV.sum(1, keepdim=True) > 0, p_BV)
        bonus_B = draw(residual_BV, rng.uniform(Role.NEXT, 1)[:, 0])
        full_B = _is_leaf(draft, last_B)
        next_B = torch.where(full_B, bonus_B, verdict.next_token_B)
        return Verdict(verdict.path_BD, verdict.num_accepted_B, next_B)


class BestOfK(Reference):
    """Wrong: verifies the branches independently and keeps the longest ("Spectr" in the code of
    MJSD)."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        B, N = draft.tokens_BN.shape
        rows_B1 = torch.arange(B)[:, None]
        parents_BD, x_BD = draft.parents_BN[:, 1:], draft.tokens_BN[:, 1:]
        q_BNV = draft.probs_BNV
        q_BDV = None if q_BNV is None else q_BNV[rows_B1, parents_BD]
        u_BD = rng.uniform(Role.ACCEPT, max(N - 1, 1))[:, : N - 1]
        passes_BN = draft.mask_BN.clone()
        passes_BN[:, 1:] &= self.accept(p_BNV[rows_B1, parents_BD], q_BDV, x_BD, u_BD)
        reached_BN = (passes_BN[:, None] | ~draft.ancestors_BNN).all(2)
        node_B = torch.where(reached_BN, draft.depth_BN, -1).argmax(1)
        p_BV = p_BNV[rows_B1[:, 0], node_B]
        child_BD = (parents_BD == node_B[:, None]) & draft.mask_BN[:, 1:]
        rejected_B = child_BD.any(1)
        if N > 1:
            x_B = x_BD.gather(1, child_BD.int().argmax(1, keepdim=True))[:, 0]
            q_BV = None if q_BNV is None else q_BNV[rows_B1[:, 0], node_B]
            left_BV, _ = self.reject(p_BV, q_BV, x_B)
            from_left_B = rejected_B & (left_BV.sum(1) > 0)
            p_BV = torch.where(from_left_B[:, None], left_BV, p_BV)
        next_B = draw(p_BV, rng.uniform(Role.NEXT, 1)[:, 0])
        depth_B = draft.depth_BN.gather(1, node_B[:, None])[:, 0]
        return Verdict(path_to(draft, node_B), depth_B, next_B)


class SortedByDraftDistribution(Reference):
    """Wrong: visits the root's children in descending order of q, not in draw order."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        return self._visit(draft, p_BNV, rng, self.score(draft, p_BNV).argsort(1, descending=True))

    def score(self, draft: Draft, p_BNV: Tensor) -> Tensor:
        assert draft.probs_BNV is not None
        return draft.probs_BNV[:, 0].gather(1, draft.tokens_BN[:, 1:])

    def _visit(self, draft: Draft, p_BNV: Tensor, rng: Stream, order_BD: Tensor) -> Verdict:
        """Verifies a tree of depth one with its leaves in another order."""
        assert int(draft.parents_BN.max()) <= 0, "a tree of depth one"
        order_BN = torch.nn.functional.pad(order_BD + 1, (1, 0))
        p_BNV = p_BNV.gather(1, order_BN[..., None].expand_as(p_BNV))
        probs_BNV = draft.probs_BNV
        assert probs_BNV is not None
        reordered = replace(
            draft,
            tokens_BN=draft.tokens_BN.gather(1, order_BN),
            mask_BN=draft.mask_BN.gather(1, order_BN),
            probs_BNV=probs_BNV.gather(1, order_BN[..., None].expand_as(probs_BNV)),
        )
        verdict = super().__call__(reordered, p_BNV, rng)
        path_BD = order_BN.gather(1, verdict.path_BD)
        return Verdict(path_BD, verdict.num_accepted_B, verdict.next_token_B)


class SortedByRatio(SortedByDraftDistribution):
    """Wrong: visits the root's children in descending order of p/q, not in draw order."""

    def score(self, draft: Draft, p_BNV: Tensor) -> Tensor:
        return p_BNV[:, 0].gather(1, draft.tokens_BN[:, 1:]) / super().score(draft, p_BNV)


class DuplicatesRemoved(Reference):
    """Wrong: removes repeated draws before verifying; their multiplicity is part of the sample."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        same_BNN = (draft.tokens_BN[:, :, None] == draft.tokens_BN[:, None]) & (
            draft.parents_BN[:, :, None] == draft.parents_BN[:, None]
        )
        repeated_BN = same_BNN.tril(-1).any(2)
        removed_BN = (repeated_BN[:, None] & draft.ancestors_BNN).any(2)
        return super().__call__(replace(draft, mask_BN=draft.mask_BN & ~removed_BN), p_BNV, rng)


class ReadsPastTheEnd(Reference):
    """Wrong: reads the rows after an end token, and rejects the end token if they hold no
    distribution."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        is_valid_BN = p_BNV.sum(-1) > 0
        is_valid_BN[:, 0] = True
        reached_BN = (is_valid_BN[:, None] | ~draft.ancestors_BNN).all(2)
        return super().__call__(replace(draft, mask_BN=draft.mask_BN & reached_BN), p_BNV, rng)


class ReadsMissingNodes(Reference):
    """Wrong: rows of nodes that do not exist influence the verdict."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        worst_B = p_BNV.sum(-1).amin(1)
        return super().__call__(draft, p_BNV * (worst_B > 0)[:, None, None], rng)


class WithReplacementAssumed(Reference):
    """Wrong: verifies draws without replacement as if they were independent."""

    accepts: frozenset[Drawn] = frozenset({"distinct"})


class UnrenormalisedDraftDistribution(WithoutReplacement):
    """Wrong: removes a rejected sibling from q without renormalising q."""

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        assert q_V is not None
        return (p_V - q_V).clamp(min=0), q_V.scatter(-1, x[..., None], 0.0)


# ------------------------------------------------------------------------------- wrong drafters


class UnwarpedDraftDistribution(ToyDrafter):
    """Wrong: draws from the warped distribution but reports the raw one."""

    def propose(self, state: ToyCache, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = super().propose(state, context, budget, rng)
        raw_BNV = self.model.logits(self.model.read_draft(state.past_B, draft)).softmax(-1)
        return replace(draft, probs_BNV=raw_BNV)


class UnlikelyDropped(ToyDrafter):
    """Wrong: drops a drawn token because its own q is small. Stopping *after* it would be valid."""

    def propose(self, state: ToyCache, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = super().propose(state, context, budget, rng)
        assert draft.probs_BNV is not None
        assert draft.is_chain
        q_BD = draft.probs_BNV[:, :-1].gather(2, draft.tokens_BN[:, 1:, None])[..., 0]
        likely_BD = (q_BD >= 0.35).long().cumprod(1).bool()
        likely_BN = torch.nn.functional.pad(likely_BD, (1, 0), value=True)
        return replace(draft, mask_BN=draft.mask_BN & likely_BN)


class StoppedByPeaks(ToyDrafter):
    """Right: stops before the first token that lowers the expected tokens per second, as estimated
    from the peaks max q_1 … max q_k. q_k depends on the tokens before x_k, not on x_k.

    Args:
        model: the model that provides the logits.
        seconds: of a round, by draft length.
    """

    def __init__(self, model: ToyModel, seconds: tuple[float, ...] = (1.0, 1.6, 1.8)) -> None:
        super().__init__(model)
        self.seconds = seconds

    def propose(self, state: ToyCache, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = super().propose(state, context, budget, rng)
        assert draft.probs_BNV is not None
        assert draft.is_chain
        survival_BD = draft.probs_BNV[:, :-1].amax(2).cumprod(1)
        tokens_BN = torch.nn.functional.pad(survival_BD, (1, 0), value=1.0).cumsum(1)
        seconds_N = tokens_BN.new_tensor(self.seconds[: draft.num_nodes])
        length_B = self.length(tokens_BN / seconds_N)
        within_BN = torch.arange(draft.num_nodes) <= length_B[:, None]
        return replace(draft, mask_BN=draft.mask_BN & within_BN)

    def length(self, goodput_BN: Tensor) -> Tensor:
        """The length of each row's draft, (B,), from the expected tokens per second by length."""
        rises_BD = goodput_BN[:, 1:] > goodput_BN[:, :-1]
        return rises_BD.long().cumprod(1).sum(1)


class RetrospectiveSearch(StoppedByPeaks):
    """Wrong: drafts everything, and then verifies the length that is best in hindsight. Whether x_k
    is verified depends on the peaks after it, and so on x_k itself (DSpark, appendix A)."""

    def length(self, goodput_BN: Tensor) -> Tensor:
        return goodput_BN.argmax(1)


class TopKAsDraws(ToyDrafter):
    """Wrong: proposes the k most probable children and declares them independent draws."""

    def __init__(self, model: ToyModel, width: int = 2) -> None:
        super().__init__(model, width, "chosen")
        self.drawn = "iid"
        self._chooser = ToyDrafter(model, width, "chosen")

    def propose(self, state: ToyCache, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft, q_BNV = self._chooser.grow(state, context, budget, rng)
        return replace(draft, probs_BNV=q_BNV, drawn="iid")


# --------------------------------------------------------------------------------- wrong models


class EntryNotRolledBack(ToyModel):
    """Wrong: the cache keeps the entry of the first rejected node."""

    def commit(self, cache: ToyCache, draft: Draft, verdict: Verdict) -> None:
        node_BN = cache.node_BN
        assert node_BN is not None
        last_B = last_accepted(verdict)
        stale_B = torch.minimum(last_B + 1, draft.num_drafted_B)
        super().commit(cache, draft, verdict)
        cache.past_B = node_BN.gather(1, stale_B[:, None])[:, 0]


# ------------------------------------------------------------------------------------- helpers


@dataclass(frozen=True)
class _OneNumber(Stream):
    """Repeats the first acceptance number at all positions."""

    inner: Stream | None = None

    def uniform(self, role: Role, num: int, first: int = 0) -> Tensor:
        assert self.inner is not None
        if role != Role.ACCEPT:
            return self.inner.uniform(role, num, first)
        return self.inner.uniform(role, 1).expand(-1, num)


def _at(probs_V: Tensor | None, x: Tensor) -> Tensor:
    """The probability of x; 1 for a chosen token, whose distribution is a point mass."""
    if probs_V is None:
        return torch.ones((), dtype=torch.float64)
    return probs_V.gather(-1, x[..., None])[..., 0]


def _is_leaf(draft: Draft, node_B: Tensor) -> Tensor:
    return ~((draft.parents_BN == node_B[:, None]) & draft.mask_BN).any(1)
