"""Records single rounds for the requests that ask for them: what was drafted, p and q of each
token, and what became of it.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from outrider.core import Round, argmax
from outrider.engine import Engine, Request, Row
from outrider.engine.request import Origin
from outrider.engine.round_observer import RowRound

Outcome = Literal["accepted", "rejected", "skipped", "dropped"]
"""What became of a drafted token. ``skipped``: the rule did not come to it, since it follows a
token that is not part of the output, or since an earlier sibling was accepted. ``dropped``:
accepted, but the output ended before it."""


@dataclass(frozen=True)
class DraftedToken:
    """A drafted token.

    Attributes:
        parent: index of its parent among the drafted tokens; None for those after the last token
            of the round before.
        token_id: the token.
        p: its probability in the target distribution, after all sampling parameters.
        q: its probability in the draft distribution; 1 for tokens that no distribution was drawn
            from, such as copied ones; None where the drafter does not say.
        logprob: the target's log-probability, before all sampling parameters.
        acceptance: the probability with which the rule accepts it, given that it comes to it; None
            where the rule has no such number, such as rules for trees or for whole blocks.
        outcome: what became of it.
    """

    parent: int | None
    token_id: int
    p: float
    q: float | None
    logprob: float
    acceptance: float | None
    outcome: Outcome


@dataclass(frozen=True)
class RecordedRound:
    """A round of one output.

    Attributes:
        drafted: the drafted tokens, parents before their children; empty if nothing was drafted.
        next_token_id: the target's own token after the accepted ones; None if the output ended
            before it.
        next_p, next_logprob: its p and log-probability, as of a drafted token.
        next_origin: ``correction``, ``bonus`` or ``plain``.
    """

    drafted: tuple[DraftedToken, ...]
    next_token_id: int | None
    next_p: float
    next_logprob: float
    next_origin: Origin


def can_record(engine: Engine) -> bool:
    """Whether nothing else observes the engine's rounds."""
    return isinstance(engine.observed.observer, RoundRecorder | None)


class RoundRecorder:
    """Observes an engine's rounds while some request wants them. All of its methods run in the
    thread that runs the engine's rounds.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rounds: dict[int, list[RecordedRound]] = {}

    def watch(self, request: Request) -> None:
        """Records a request's rounds from now on."""
        self._rounds[id(request)] = []
        self._engine.observed.observer = self

    def unwatch(self, request: Request) -> None:
        """Ends that; may be repeated."""
        self._rounds.pop(id(request), None)
        if not self._rounds and self._engine.observed.observer is self:
            self._engine.observed.observer = None

    def take(self, request: Request) -> tuple[RecordedRound, ...]:
        """A request's rounds since the last call; none for a request that is not watched."""
        found = self._rounds.get(id(request), [])
        taken = tuple(found)
        found.clear()
        return taken

    # ---------------------------------------------------------- for the engine (RoundObserver)

    @contextmanager
    def round(self) -> Iterator[None]:
        """See ``RoundObserver``; nothing is done between rounds."""
        yield

    def observe(self, round_: Round, rows: Sequence[Row]) -> _Observation:
        """See ``RoundObserver``."""
        watched = any(id(row.request) in self._rounds for row in rows)
        return _Observation(self, self._blocks(round_, rows) if watched else [])

    def read(self, done: RowRound, line: Sequence[list[float]]) -> None:
        """Takes over a row's numbers."""
        rounds = self._rounds.get(id(done.row.request))
        if rounds is not None:
            rounds.append(_recorded(done, line))

    def _blocks(self, round_: Round, rows: Sequence[Row]) -> list[Tensor]:
        draft, verdict = round_.draft, round_.verdict
        parents_BD = draft.parents_BN[:, 1:].clamp(min=0)
        tokens_BD = draft.tokens_BN[:, 1:]
        p_BNV = round_.p_BNV
        if round_.verified_by_logits:
            p_BNV = one_hot(argmax(p_BNV), p_BNV.shape[-1])
        logprobs_BNV = round_.scores.logits_BNV.float().log_softmax(-1)
        last_B1 = _last_accepted(round_)
        next_B1 = verdict.next_token_B[:, None]
        return [
            verdict.path_BD,
            parents_BD,
            draft.mask_BN[:, 1:].long(),
            tokens_BD,
            _at(p_BNV, parents_BD, tokens_BD),
            _draft_probs(round_, parents_BD),
            _at(logprobs_BNV, parents_BD, tokens_BD),
            self._acceptance(round_, rows),
            next_B1,
            _at(p_BNV, last_B1, next_B1),
            _at(logprobs_BNV, last_B1, next_B1),
        ]

    def _acceptance(self, round_: Round, rows: Sequence[Row]) -> Tensor:
        """The probability with which the rule accepts each drafted token, NaN where unknown;
        (B, D)."""
        draft = round_.draft
        greedy = all(row.request.sampling.greedy for row in rows)
        recipe = self._engine.recipe
        rule = recipe.greedy_verifier if greedy else recipe.verifier
        tokens_BD1 = draft.tokens_BN[:, 1:, None]
        if rule.needs == "argmax" and draft.is_chain:
            hits_BD = argmax(round_.p_BNV)[:, :-1] == tokens_BD1[..., 0]
            return hits_BD.float()
        acceptance = getattr(rule, "acceptance", None)
        unknown = torch.full(tokens_BD1.shape[:2], math.nan, device=tokens_BD1.device)
        if rule.needs != "distribution" or acceptance is None or not draft.is_chain:
            return unknown
        p_BDV = round_.p_BNV[:, :-1]
        if draft.probs_BNV is not None:
            q_BDV = draft.probs_BNV[:, :-1]
        elif draft.drawn == "chosen":
            q_BDV = one_hot(tokens_BD1[..., 0], p_BDV.shape[-1]).to(p_BDV.dtype)
        else:
            return unknown
        found: Tensor = acceptance(p_BDV, q_BDV).gather(2, tokens_BD1)
        return found[..., 0]


@dataclass(frozen=True)
class _Observation:
    """A recorder's part in one round (``engine.round_observer.Observation``)."""

    recorder: RoundRecorder
    blocks: Sequence[Tensor]

    def read(self, done: RowRound, line: Sequence[list[float]]) -> None:
        self.recorder.read(done, line)


def _at(values_BNV: Tensor, nodes_BD: Tensor, tokens_BD: Tensor) -> Tensor:
    """The values of tokens at nodes, (B, D)."""
    rows_B1 = torch.arange(len(nodes_BD), device=nodes_BD.device)[:, None]
    return values_BNV[rows_B1, nodes_BD, tokens_BD].float()


def _last_accepted(round_: Round) -> Tensor:
    """The node after which the target's own token lies, (B, 1)."""
    verdict = round_.verdict
    path_BN = pad(verdict.path_BD, (1, 0))
    return path_BN.gather(1, verdict.num_accepted_B[:, None])


def _draft_probs(round_: Round, parents_BD: Tensor) -> Tensor:
    """q of each drafted token, NaN where the drafter does not say; (B, D)."""
    draft = round_.draft
    tokens_BD = draft.tokens_BN[:, 1:]
    if draft.probs_BNV is not None:
        return _at(draft.probs_BNV, parents_BD, tokens_BD)
    if draft.drawn_probs_BN is not None:
        return draft.drawn_probs_BN[:, 1:].float()
    value = 1.0 if draft.drawn == "chosen" else math.nan
    return torch.full(tokens_BD.shape, value, device=tokens_BD.device)


def _recorded(done: RowRound, line: Sequence[list[float]]) -> RecordedRound:
    path, parents, exists, tokens, ps, qs, logprobs, acceptances, *own = line
    accepted = [int(node) for node in path[: done.accepted]]
    nodes = [node for node in range(1, len(tokens) + 1) if exists[node - 1]]
    index = {node: i for i, node in enumerate(nodes)}
    parent_of = {node: int(parents[node - 1]) for node in nodes}
    drafted = tuple(
        DraftedToken(
            index.get(parent_of[node]),
            int(tokens[node - 1]),
            ps[node - 1],
            _known(qs[node - 1]),
            logprobs[node - 1],
            _known(acceptances[node - 1]),
            _outcome(node, parent_of, accepted, done.kept),
        )
        for node in nodes
    )
    ((token,), (p,), (logprob,)) = own
    emitted = done.kept > done.accepted
    origin: Origin = "plain"
    if drafted:
        origin = "correction" if done.counts.rejected else "bonus"
    return RecordedRound(drafted, int(token) if emitted else None, p, logprob, origin)


def _outcome(node: int, parent_of: dict[int, int], accepted: list[int], kept: int) -> Outcome:
    if node in accepted:
        return "accepted" if accepted.index(node) < kept else "dropped"
    parent = parent_of[node]
    if parent and parent not in accepted:
        return "skipped"
    elder_wins = any(parent_of[other] == parent and other < node for other in accepted)
    return "skipped" if elder_wins else "rejected"


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number
