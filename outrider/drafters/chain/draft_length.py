"""How long a draft gets: where it stops, a length that follows what was accepted, and a length by
the number of running rows.

Stops are in ``stop.py``, tables of lengths in ``length_table.py``. The heuristic is
``num_assistant_tokens_schedule`` of ``transformers``, here with a length per row:

    γ ← γ + 2 where all of a draft was accepted, else max(1, γ - 1)

A length depends on past rounds and on the number of rows only and is known before the round, so
under a lossless rule the output keeps its distribution.

Legend: B rows, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.core import (
    Acceptance,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drafter,
    Drawn,
    Scores,
    Stream,
    prompt_reader,
)
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.core.values import shown
from outrider.drafters.chain.length_table import LengthTable
from outrider.drafters.chain.stop import Both, Confidence, Stop, Survival
from outrider.runtime.prefill import Prefilling, begin

START = 5
MOST = 20
_LONGEST = 2**31


class _Around:
    """What policies around another drafter share: they change its ``propose`` alone."""

    def __init__(self, drafter: Drafter[Any]) -> None:
        self.drafter = drafter

    @property
    def drawn(self) -> Drawn:
        return self.drafter.drawn

    def start(self, context: Context) -> Any:
        return self.begin(context).finish()

    def begin(self, context: Context) -> Prefilling:
        """As :meth:`start`, but the caller runs the forward passes."""
        return begin(self.drafter, context)

    def read_prompt(self, state: Any, context: Context, hidden_BNH: Tensor, first: int) -> None:
        prompt_reader(self.drafter, state, context)(hidden_BNH, first)

    def commit(self, state: Any, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        self.drafter.commit(state, draft, verdict, scores)

    def join(self, state: Any, other: Any) -> None:
        self.drafter.join(state, other)


class Stopped(_Around):
    """Any drafter with a stop: its drafts are cut where the stop says so, trees path by path.

    This saves work of the target, not of the drafter. A drafter that can stop by itself
    (``ModelDrafter``) drafts the same tokens and saves its own forward passes as well. At
    temperature 0 there is no q, and nothing is cut.

    Raises:
        IncompatibleError: a drafter whose tokens are not draws. Chosen tokens have no q, and the
            beginning of what a search found is not what a shorter search would have found.
    """

    def __init__(self, drafter: Drafter[Any], stop: Stop) -> None:
        if drafter.drawn in ("chosen", "searched"):
            raise IncompatibleError(
                f"{type(drafter).__name__} draws none of its tokens, so there are no probabilities "
                f"to stop by: leave draft_length at 'fixed', or take 'heuristic'"
            )
        super().__init__(drafter)
        self.stop = stop

    @property
    def capabilities(self) -> Capabilities[Any]:
        own = self.drafter.capabilities
        return replace(own, fused_lengths=(), stops_early=True, reviews=False, starts_late=False)

    def propose(self, state: Any, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = self.drafter.propose(state, context, budget, rng)
        return draft if draft.probs_BNV is None else cut(draft, self.stop)


@dataclass
class LengthState:
    """The drafter's own state, and a draft length per row.

    Attributes:
        inner: the drafter's state.
        next_B: length of the next draft, before a budget shortens it.
        asked_B: length of the last draft that the drafter was asked for.
    """

    inner: Any
    next_B: Tensor
    asked_B: Tensor

    def keep(self, rows: Sequence[int]) -> None:
        self.inner.keep(rows)
        kept_B = torch.tensor(rows, dtype=torch.int64, device=self.next_B.device)
        self.next_B = self.next_B[kept_B]


class HeuristicLength(_Around):
    """Any drafter, with a draft length that grows by two and shrinks by one, row by row.

    Reads the lengths from the device once per round, before the round starts any work there. Rows
    that drafted nothing keep their length. The round's budget bounds every length.

    Args:
        drafter: the drafter.
        start: length of a row's first draft.

    Raises:
        InvalidParameterError: a first length below 1.
    """

    def __init__(self, drafter: Drafter[Any], start: int = START) -> None:
        if start < 1:
            raise InvalidParameterError(f"draft_length='heuristic:{start}': must be 1 or more")
        super().__init__(drafter)
        self.first = start

    @property
    def capabilities(self) -> Capabilities[Any]:
        """The drafter's; a larger γ than the engine's default, since the length adapts below it.
        Programs that draft several tokens at once have another length."""
        own = self.drafter.capabilities
        depth = MOST if own.depth is None else own.depth
        fused = own.fused_lengths if own.fused_lengths == (1,) else ()
        return replace(
            own,
            depth=depth,
            fused_lengths=fused,
            rewindable=False,
            reviews=False,
            starts_late=False,
        )

    def begin(self, context: Context) -> Prefilling:
        first_B = torch.full_like(context.length_B, self.first)
        inner = begin(self.drafter, context)
        return Prefilling(LengthState(inner.state, first_B, first_B), inner.prefills)

    def read_prompt(
        self, state: LengthState, context: Context, hidden_BNH: Tensor, first: int
    ) -> None:
        prompt_reader(self.drafter, state.inner, context)(hidden_BNH, first)

    def propose(self, state: LengthState, context: Context, budget: Budget, rng: Stream) -> Draft:
        most_B = budget.max_tokens if budget.tokens_B is None else budget.tokens_B
        state.asked_B = state.next_B.clamp(max=most_B)
        asked = state.asked_B.tolist()
        same = min(asked) == max(asked)
        asked_B = None if same else state.asked_B
        shorter = replace(budget, max_tokens=max(asked), tokens_B=asked_B)
        return self.drafter.propose(state.inner, context, shorter, rng)

    def commit(self, state: LengthState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        self.drafter.commit(state.inner, draft, verdict, scores)
        drafted_B = draft.depth_BN.where(draft.mask_BN, 0).amax(1)
        shorter_B = (state.asked_B - 1).clamp(min=1)
        all_B = verdict.num_accepted_B == drafted_B
        next_B = torch.where(all_B, state.asked_B + 2, shorter_B)
        state.next_B = torch.where(drafted_B > 0, next_B, state.next_B)

    def join(self, state: LengthState, other: LengthState) -> None:
        self.drafter.join(state.inner, other.inner)
        state.next_B = torch.cat([state.next_B, other.next_B])


class LengthByRows(_Around):
    """Any drafter, with a draft length by the number of running rows.

    A length of 0 runs no draft model. Its KV cache then falls behind, and the next draft first
    reads the tokens that it lacks. With a seed, a sampled output depends on when the other rows of
    its batch come and go, because the lengths decide where rounds begin; its distribution does not.

    Args:
        drafter: the drafter.
        table: the lengths.
    """

    def __init__(self, drafter: Drafter[Any], table: LengthTable) -> None:
        super().__init__(drafter)
        self.table = table

    @property
    def capabilities(self) -> Capabilities[Any]:
        """The drafter's, with the longest length of the table as its depth."""
        own = self.drafter.capabilities
        return replace(own, depth=self.table.most or own.depth, reviews=False, starts_late=False)

    def propose(self, state: Any, context: Context, budget: Budget, rng: Stream) -> Draft:
        most = self.table.length(context.num_rows)
        if most < budget.max_tokens:
            tokens_B = budget.tokens_B
            shorter_B = None if tokens_B is None else tokens_B.clamp(max=most)
            budget = replace(budget, max_tokens=most, tokens_B=shorter_B)
        return self.drafter.propose(state, context, budget, rng)


@dataclass(frozen=True)
class DraftLength:
    """A policy for draft lengths.

    Attributes:
        stop: where drafts stop; None if only their budget ends them.
        start: first length of the heuristic; None if lengths do not change.
        table: lengths by the number of running rows; None if they do not depend on it.
    """

    stop: Stop | None = None
    start: int | None = None
    table: LengthTable | None = None

    @classmethod
    def parse(cls, text: str) -> "DraftLength":
        """``fixed``, ``heuristic[:START]``, ``confidence[:C]``, ``survival[:θ]``, or ``table:`` and
        a table in JSON.

        Raises:
            InvalidParameterError: another name, or a number outside its range.
        """
        name, colon, number = text.partition(":")
        if name == "table" and colon:
            return cls(table=LengthTable.parse(number))
        try:
            if text == "fixed":
                return cls()
            if name == "heuristic":
                start = int(number) if colon else START
                if 1 <= start <= _LONGEST:
                    return cls(start=start)
            elif name in ("confidence", "survival"):
                make = Confidence if name == "confidence" else Survival
                return cls(make(float(number)) if colon else make())
        except ValueError:
            pass
        raise _no_policy(text)

    @classmethod
    def of(cls, value: object) -> "DraftLength":
        """A policy from its name, from None for ``fixed``, or from the lists of a table; a policy
        itself is returned as it is.

        Raises:
            InvalidParameterError: anything else.
        """
        if value is None or isinstance(value, cls):
            return value or FIXED
        if isinstance(value, list | tuple):
            return cls(table=LengthTable.of(value))
        if not isinstance(value, str):
            raise _no_policy(value)
        return cls.parse(value)

    def and_confidence(self, threshold: float) -> Stop | None:
        """This policy's stop, and besides one after tokens with ``q(x) < threshold``; a threshold
        of 0 adds none."""
        unsure = Confidence(threshold)
        if not threshold:
            return self.stop
        return unsure if self.stop is None else Both(self.stop, unsure)

    def around(self, drafter: Drafter[Any]) -> Drafter[Any]:
        """The drafter under this policy; a drafter that stops early by itself needs no stop.

        Raises:
            IncompatibleError: the policy has a stop, and the drafter draws none of its tokens.
        """
        if self.stop is not None and not drafter.capabilities.stops_early:
            drafter = Stopped(drafter, self.stop)
        if self.table is not None:
            return LengthByRows(drafter, self.table)
        return drafter if self.start is None else HeuristicLength(drafter, self.start)


FIXED = DraftLength()


def _no_policy(value: object) -> InvalidParameterError:
    return InvalidParameterError(
        f"draft_length={shown(value)}: must be fixed, heuristic or heuristic:START (1 or more), "
        f"confidence:C or survival:THETA (0 to 1), or table:[[FIRST, LAST, γ], …]"
    )


def cut(draft: Draft, stop: Stop) -> Draft:
    """The draft without the nodes after those where it stops. The draft must have
    probabilities."""
    q_BN = _token_probs(draft)
    survival_BN = torch.where(draft.ancestors_BNN, q_BN[:, None], 1.0).prod(2)
    stops_BN = ~stop.goes_on(q_BN, survival_BN)
    stops_BN[:, 0] = False  # the root is no drafted token
    above_BNN = draft.ancestors_BNN.tril(-1)
    return replace(draft, mask_BN=draft.mask_BN & ~(above_BNN & stops_BN[:, None]).any(2))


def _token_probs(draft: Draft) -> Tensor:
    """q of each node's token after its parent, (B, N); 1 at the root."""
    assert draft.probs_BNV is not None
    V = draft.probs_BNV.shape[2]
    place_BN = draft.parents_BN.clamp(min=0) * V + draft.tokens_BN
    q_BN = draft.probs_BNV.flatten(1).gather(1, place_BN)
    q_BN[:, 0] = 1.0
    return q_BN
