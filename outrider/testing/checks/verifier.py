"""Contract of verifiers: verdicts are well-formed, and lossless rules preserve the distribution.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

from dataclasses import replace
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Context,
    Draft,
    Drawn,
    Ends,
    Prefix,
    Role,
    Stream,
    Verdict,
    Verifier,
)
from outrider.testing.checks._common import holds, require
from outrider.testing.enumerate import (
    DistributionFactory,
    enumerate_round,
    greedy_distribution,
    softmax_distribution,
)
from outrider.testing.script import ScriptedStream
from outrider.testing.toy import ToyCache, ToyDrafter, ToyModel, last_accepted

_BELOW_ONE = 1 - 2.0**-52
_PROMPTS = [[0], [1, 2, 0], [2, 2], [0, 1], [1, 1, 0, 2], [2]] * 8


def check_verifier(
    verifier: Verifier,
    *,
    trees: bool = True,
    accepts_own_distribution: bool = True,
    keeps_support: bool = True,
) -> dict[str, float]:
    """Checks that verdicts are well-formed, and that a rule that claims to be lossless is.

    Runs ENUM for every kind of draft that the rule accepts, on chains and trees. Rows after the end
    of a sequence, and rows of nodes that do not exist, may hold anything including NaN; they must
    not change what is emitted up to the end.

    Args:
        verifier: the rule.
        trees: whether the rule verifies trees.
        accepts_own_distribution: whether the rule fully accepts a chain drawn from the target's own
            distribution (as does every rule that accepts with probability min(1, p/q)).
        keeps_support: whether the rule never emits a token that has probability zero under the
            target (as does every rule that does not mix in the draft distribution).

    Returns:
        The total variation of each case, by name; for a lossy rule, compare them with its bound.

    Raises:
        AssertionError: the message names the violated guarantee.
    """
    require(bool(verifier.accepts), "accepts no kind of draft")
    require(verifier.accepts <= set(get_args(Drawn)), f"accepts {verifier.accepts}")
    require(verifier.needs in ("distribution", "argmax", "logits"), f"needs {verifier.needs!r}")
    require(
        verifier.bound.lossless == verifier.lossless,
        f"lossless is {verifier.lossless}, the bound says {verifier.bound.words!r}",
    )
    greedy = verifier.needs != "distribution"
    distributions: dict[str, DistributionFactory] = {"greedy": greedy_distribution}
    if not greedy:
        distributions["softmax"] = softmax_distribution
    target, guess = ToyModel.random(3, seed=32), ToyModel.random(3, seed=33)
    pairs = {
        "full": (target, guess),
        "partial": tuple(ToyModel.random(3, seed=s, num_impossible=1) for s in (32, 33)),
    }
    make_drafter = _WithLogits if verifier.needs == "logits" else ToyDrafter
    shapes = [("chain", 1, 3), ("siblings", 2, 2), ("tree", 2, 3)]
    shapes = shapes if trees else shapes[:1]
    if accepts_own_distribution and "iid" in verifier.accepts:
        own_distribution = distributions["greedy" if greedy else "softmax"]
        own = enumerate_round(
            target, make_drafter(target), verifier, 3, distribution=own_distribution
        )
        require(
            abs(own.acceptance_length - 4) < 1e-12,
            f"a draft of 3 from the target's own distribution should yield 3 tokens and a bonus, "
            f"not {own.acceptance_length:.4f}",
        )
    found: dict[str, float] = {}
    for drawn in sorted(verifier.accepts):
        for shape, width, num_tokens in shapes:
            for support, (model, draft_model) in pairs.items():
                drafter = make_drafter(draft_model, width, drawn)
                _check_verdicts(verifier, model, drafter, distributions, keeps_support)
                for name, distribution in distributions.items():
                    result = enumerate_round(
                        model, drafter, verifier, num_tokens, distribution=distribution
                    )
                    case = f"{drawn} {shape} of {support} support under a {name} distribution"
                    found[case] = result.total_variation
                    require(
                        not verifier.lossless or result.total_variation < 1e-12,
                        f"claims to be lossless, but is off by {result.total_variation:.3g} "
                        f"in total variation: {case}",
                    )
                _check_irrelevant_rows(verifier, model, drafter, distributions)
    return found


class _WithLogits(ToyDrafter):
    """Also provides the model's logits, as drafters do for rules that read them."""

    def propose(self, state: ToyCache, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = super().propose(state, context, budget, rng)
        node_BN = self.model.read_draft(state.past_B, draft)
        return replace(draft, logits_BNV=self.model.logits(node_BN))


def _check_verdicts(
    verifier: Verifier,
    target: ToyModel,
    drafter: ToyDrafter,
    distributions: dict[str, DistributionFactory],
    keeps_support: bool,
) -> None:
    """Checks shapes, paths, impossible tokens and extreme random numbers, and that a row alone is
    verified as in its batch."""
    B = len(_PROMPTS)
    for distribution in distributions.values():
        for num_tokens in (0, 3):
            context, draft, logits_BNV = _round(target, drafter, distribution, num_tokens)
            p_BNV = context.distribution(logits_BNV, Prefix.of_draft(context, draft))
            verified_BNV = p_BNV if verifier.needs == "distribution" else logits_BNV
            if not keeps_support:
                p_BNV = torch.ones_like(p_BNV)
            elif verifier.needs == "logits":
                p_BNV = logits_BNV.softmax(-1)
            streams: list[Stream] = [context.rng]
            for accept in (0.0, _BELOW_ONE):
                streams += [_constant(B, accept, last) for last in (0.0, _BELOW_ONE)]
            for rng in streams:
                _check_verdict(verifier(draft, verified_BNV, rng), draft, p_BNV)
            together = verifier(draft, verified_BNV, context.rng)
            for b in (0, 1, B - 1):
                row = slice(b, b + 1)
                alone = Draft(
                    draft.tokens_BN[row],
                    draft.parents_BN[row],
                    draft.mask_BN[row],
                    None if draft.probs_BNV is None else draft.probs_BNV[row],
                    draft.drawn,
                    draft.is_chain,
                    None if draft.logits_BNV is None else draft.logits_BNV[row],
                )
                stream = Stream(context.key_B[row], context.length_B[row])
                verdict = verifier(alone, verified_BNV[row], stream)
                n = int(verdict.num_accepted_B)
                require(
                    n == int(together.num_accepted_B[b])
                    and verdict.emitted(alone)[0, : n + 1].tolist()
                    == together.emitted(draft)[b, : n + 1].tolist(),
                    f"row {b} alone is verified differently than in its batch",
                )


def _round(
    target: ToyModel, drafter: ToyDrafter, distribution: DistributionFactory, num_tokens: int
) -> tuple[Context, Draft, Tensor]:
    """A batch with ragged prompts and budgets, its draft, and the target's logits."""
    B = len(_PROMPTS)
    context = Context.start(_PROMPTS, distribution(B), [5] * B, range(B))
    budget = Budget(num_tokens, torch.arange(B) % (num_tokens + 1))
    draft = drafter.propose(drafter.start(context), context, budget, context.rng)
    return context, draft, target.score(target.start(context), draft).logits_BNV


def _check_irrelevant_rows(
    verifier: Verifier,
    target: ToyModel,
    drafter: ToyDrafter,
    distributions: dict[str, DistributionFactory],
) -> None:
    """Checks that a verdict does not depend on rows that it must not read.

    These are all rows of nodes that do not exist, the draft's rows at nodes without children, and
    all rows at and after an end token, whether or not the draft is cut there. They are filled with
    NaN, and the tokens emitted up to the end must not change.
    """
    rounds = []
    for distribution in distributions.values():
        context, draft, verified_BNV = _round(target, drafter, distribution, 3)
        if verifier.needs == "distribution":
            verified_BNV = context.distribution(verified_BNV, Prefix.of_draft(context, draft))
        rounds.append((context.rng, draft, verified_BNV))
    for (rng, draft, verified_BNV), token in product(rounds, (None, *range(target.vocab_size))):
        ids = () if token is None else (token,)
        ends = Ends.of([ids] * draft.tokens_BN.shape[0], [0] * draft.tokens_BN.shape[0])
        cut = ends.cut(draft)
        healthy = _emitted(verifier(cut, verified_BNV, rng), cut, token)
        ended_BN = ends.are_ends(draft.tokens_BN)
        ended_BN[:, 0] = False
        ended_path_BN = (draft.ancestors_BNN & ended_BN[:, None]).any(2)
        unused_BN = ~cut.mask_BN | ended_path_BN
        unread_BN = unused_BN | ~_has_children(cut)
        for what, one in (("cut at its end token", cut), ("that runs past its end", draft)):
            poisoned = replace(
                one,
                probs_BNV=_poisoned(one.probs_BNV, unread_BN),
                logits_BNV=_poisoned(one.logits_BNV, unread_BN),
            )
            p_BNV = _poisoned(verified_BNV, unused_BN)
            assert p_BNV is not None
            verdict = verifier(poisoned, p_BNV, rng)
            within = (verdict.next_token_B >= 0) & (verdict.next_token_B < p_BNV.shape[2])
            require(holds(within), "next_token out of range after the end of a sequence")
            require(
                _emitted(verdict, poisoned, token) == healthy,
                f"rows after the end, or of nodes that do not exist, change a verdict on a draft "
                f"{what}",
            )


def _emitted(verdict: Verdict, draft: Draft, end: int | None) -> list[list[int]]:
    """The emitted tokens of each row, up to and including the end token."""
    lines = verdict.emitted(draft).tolist()
    lines = [line[: n + 1] for line, n in zip(lines, verdict.num_accepted_B.tolist(), strict=True)]
    return [line[: line.index(end) + 1] if end in line else line for line in lines]


def _has_children(draft: Draft) -> Tensor:
    """Which nodes have a child that exists, (B, N)."""
    is_parent_BNN = draft.parents_BN[:, None] == torch.arange(draft.num_nodes)[:, None]
    return (is_parent_BNN & draft.mask_BN[:, None]).any(2)


def _poisoned(rows_BNV: Tensor | None, where_BN: Tensor) -> Tensor | None:
    return None if rows_BNV is None else rows_BNV.masked_fill(where_BN[..., None], torch.nan)


def _check_verdict(verdict: Verdict, draft: Draft, p_BNV: Tensor) -> None:
    B, N = draft.tokens_BN.shape
    num_B, path_BD = verdict.num_accepted_B, verdict.path_BD
    require(num_B.shape == (B,), f"num_accepted_B has shape {tuple(num_B.shape)}")
    require(verdict.next_token_B.shape == (B,), "next_token_B is not one token per row")
    require(path_BD.shape[0] == B, f"path_BD has shape {tuple(path_BD.shape)}")
    require(holds((num_B >= 0) & (num_B <= path_BD.shape[1])), "num_accepted exceeds the path")
    require(holds((path_BD >= 0) & (path_BD < N)), "path_BD holds indices of no node")
    step_D = torch.arange(path_BD.shape[1], device=path_BD.device)
    on_path_BD = step_D < num_B[:, None]
    above_BD = torch.nn.functional.pad(path_BD, (1, 0))[:, :-1]
    linked_BD = draft.parents_BN.gather(1, path_BD) == above_BD
    require(holds(linked_BD | ~on_path_BD), "the accepted path is not a path from the root")
    require(
        holds(draft.mask_BN.gather(1, path_BD) | ~on_path_BD), "accepts a node that does not exist"
    )
    tokens_BD = draft.tokens_BN.gather(1, path_BD)
    p_above_BDV = p_BNV.gather(1, above_BD[..., None].expand(*above_BD.shape, p_BNV.shape[2]))
    possible_BD = p_above_BDV.gather(2, tokens_BD[..., None])[..., 0] > 0
    require(holds(possible_BD | ~on_path_BD), "accepts a token that the target never emits")
    last_B = last_accepted(verdict)
    p_BV = p_BNV[torch.arange(B, device=last_B.device), last_B]
    in_range = (verdict.next_token_B >= 0) & (verdict.next_token_B < p_BV.shape[1])
    require(holds(in_range), "next_token out of range")
    possible_B = p_BV.gather(1, verdict.next_token_B[:, None]) > 0
    require(holds(possible_B), "draws a next token that the target never emits")


def _constant(num_rows: int, accept: float, other: float) -> Stream:
    """A stream with one constant for acceptance numbers and another for all others."""
    zero_B = torch.zeros(num_rows, dtype=torch.int64)
    numbers = {
        role: torch.full(
            (num_rows, 64), accept if role == Role.ACCEPT else other, dtype=torch.float64
        )
        for role in Role
    }
    return ScriptedStream(zero_B, zero_B, numbers)
