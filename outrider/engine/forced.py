"""Drafts the tokens that grammars leave no choice about, without running a draft model.

Where a grammar allows one continuation only (the name of a required property, the text around a
call's arguments), p is a point mass at each of its tokens. A draft of these tokens is always
accepted, and it costs no draft model's forward pass. They are proposed like any other tokens:

    for rules that read q    q is the point mass at the forced token, from which it is a draw
    for chosen drafts        the token is chosen

so the rule that verifies them stays lossless, and would stay so if p were no point mass.

A row drafts forced tokens alone if they fill at least half of what it may draft. Then the drafter
does not run, unless other rows need it. In the other rows the drafter drafts: a draft model draws
forced tokens itself, since its q is masked, too, and copied chains get them in front. A row's draft
depends on that row alone, as its output must.

Legend: B rows, N nodes, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import eq
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import (
    Acceptance,
    Budget,
    Context,
    Draft,
    Drafter,
    Scores,
    Stream,
    Verdict,
    Verifier,
)
from outrider.engine.grammar import GrammarProcessor
from outrider.sampling import Warp


class ForcedTokens:
    """A drafter with forced tokens in front. It shares the state of the drafter, which need not
    take part in a round: its models catch up with what was committed meanwhile.

    Args:
        drafter: drafts where too few tokens are forced.
        num_tokens: the target's vocabulary.
        dtype: of the distributions that the rule reads.
        rows: which rows may have forced tokens; None for all.

    Attributes:
        limits: of each row, the most tokens that may be forced; None for as many as the budget
            has. A governor that finds drafting too slow says nothing of tokens that are free.
        numbers: of each row, the tokens at the beginning of the last draft that were forced.
    """

    def __init__(
        self,
        drafter: Drafter[Any],
        num_tokens: int,
        dtype: torch.dtype = torch.float32,
        rows: Sequence[bool] | None = None,
    ) -> None:
        self.drafter = drafter
        self.drawn = drafter.drawn
        self.capabilities = drafter.capabilities
        self.limits: Sequence[int] | None = None
        self.numbers: list[int] = []
        self._num_tokens = num_tokens
        self._dtype = dtype
        self._rows = rows
        self._alone: list[bool] = []
        self._inner: Draft | None = None

    @property
    def ran_drafter(self) -> bool:
        """Whether the drafter took part in the last draft."""
        return self._inner is not None

    def start(self, context: Context) -> Any:
        return self.drafter.start(context)

    def propose(self, state: Any, context: Context, budget: Budget, rng: Stream) -> Draft:
        room = _room(budget, context)
        limits = room if self.limits is None else self.limits
        if self._rows is not None:
            limits = [most if may else 0 for most, may in zip(limits, self._rows, strict=True)]
        forced = [_cut(context, b, _forced(context, b), most) for b, most in enumerate(limits)]
        self._alone = [
            most == 0 or 2 * len(tokens) >= most for tokens, most in zip(forced, room, strict=True)
        ]
        self._inner = None
        self.numbers = list(map(len, forced))
        if all(self._alone):
            tokens_BN, mask_BN = _table(context.root_B, forced)
            return Draft.chain(tokens_BN, mask_BN, self._point_masses(tokens_BN), self.drawn)
        self._inner = draft = self.drafter.propose(state, context, budget, rng)
        if draft.is_chain and self.drawn == "chosen":
            draft = _with_front(draft, forced)
        else:
            self.numbers = [
                n if alone else 0 for n, alone in zip(self.numbers, self._alone, strict=True)
            ]
        chains = {b: forced[b] for b, alone in enumerate(self._alone) if alone and forced[b]}
        return self._replaced(draft, chains) if chains else draft

    def commit(self, state: Any, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        inner = self._inner
        if inner is None:
            return
        if draft is not inner:  # of what is not its own, the drafter keeps the root alone
            own = inner.num_nodes
            accepted = [
                0 if forced else int(num)
                for num, forced in zip(verdict.num_accepted.host, self.numbers, strict=True)
            ]
            num_B = torch.tensor(accepted, device=verdict.num_accepted_B.device)
            path_BD = verdict.path_BD[:, : own - 1].clamp(max=max(own - 1, 0))
            verdict = Verdict(path_BD, num_B, verdict.next_token_B).read(accepted)
            scores = Scores(scores.logits_BNV[:, :own], scores.hidden_BNH)
        self.drafter.commit(state, inner, verdict, scores)

    def join(self, state: Any, other: Any) -> None:
        self.drafter.join(state, other)

    def _replaced(self, draft: Draft, chains: Mapping[int, Sequence[int]]) -> Draft:
        """The draft with chains of forced tokens in the place of some rows."""
        B, N = draft.tokens_BN.shape
        more = max(0, max(map(len, chains.values())) + 1 - N)
        node_N = torch.arange(N + more, device=draft.tokens_BN.device)
        tokens_BN, mask_BN = pad(draft.tokens_BN, (0, more)), pad(draft.mask_BN, (0, more))
        parents_BN = torch.cat([draft.parents_BN, (node_N[N:] - 1).expand(B, more)], 1)
        q_BNV, drawn_BN = draft.probs_BNV, draft.drawn_probs_BN
        if q_BNV is not None:
            q_BNV = pad(q_BNV, (0, 0, 0, more), value=1 / q_BNV.shape[2])
        if drawn_BN is not None:
            drawn_BN = pad(drawn_BN, (0, more), value=1.0)
        for b, chain in chains.items():
            k = len(chain)
            tokens_BN[b, 1 : k + 1] = torch.tensor(chain, device=tokens_BN.device)
            mask_BN[b], parents_BN[b] = node_N <= k, node_N - 1
            if q_BNV is not None:
                q_BNV[b, :k] = 0.0
                q_BNV[b, :k].scatter_(1, tokens_BN[b, 1 : k + 1, None], 1.0)
            if drawn_BN is not None:
                drawn_BN[b] = 1.0
        longest = draft.max_walk_length
        return replace(
            draft,
            tokens_BN=tokens_BN,
            parents_BN=parents_BN,
            mask_BN=mask_BN,
            probs_BNV=q_BNV,
            logits_BNV=None,
            drawn_probs_BN=drawn_BN,
            max_walk_length=None if longest is None else max([longest, *map(len, chains.values())]),
        )

    def _point_masses(self, tokens_BN: Tensor) -> Tensor | None:
        """q at each node, (B, N, V): all of it on the next node's token; uniform at the last one,
        so that no rule divides by zero there. None for chosen drafts."""
        if self.drawn == "chosen":
            return None
        B, N = tokens_BN.shape
        q_BNV = torch.zeros(B, N, self._num_tokens, dtype=self._dtype, device=tokens_BN.device)
        q_BNV[:, :-1].scatter_(2, tokens_BN[:, 1:, None], 1.0)
        q_BNV[:, -1] = 1 / self._num_tokens
        return q_BNV


def can_force(drafter: Drafter[Any], verifier: Verifier) -> bool:
    """Whether forced tokens may take the place of a drafter's: the rule reads nothing of a draft
    but its tokens and q, and the drafter needs no hidden states of every round."""
    able, searched = drafter.capabilities, drafter.drawn == "searched"
    return verifier.lossless and able.drafts and not searched and not able.hidden_layers


def _forced(context: Context, row: int) -> Sequence[int]:
    """The tokens that a row's grammar forces next."""
    distribution = context.distribution
    if not isinstance(distribution, Warp):
        return ()
    for processor in distribution.samplings[row].processors:
        if isinstance(processor, GrammarProcessor):
            return processor.forced(context.tokens_BT[row, : context.lengths[row]])
    return ()


def _room(budget: Budget, context: Context) -> list[int]:
    """How many tokens each row may draft."""
    if budget.tokens_B is None:
        return [budget.max_tokens] * context.num_rows
    return [int(most) for most in budget.tokens_B.tolist()]


def _cut(context: Context, row: int, tokens: Sequence[int], most: int) -> Sequence[int]:
    """The tokens within the row's budget, and up to its end."""
    tokens = tokens[: max(most, 0)]
    return tokens if context.ends is None else context.ends.cut_tokens(row, tokens)


def _table(root_B: Tensor, chains: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Chains below their roots, and which nodes exist; None if all do."""
    most = max(map(len, chains))
    padded = torch.tensor([[*chain, *[0] * (most - len(chain))] for chain in chains])
    tokens_BN = torch.cat([root_B[:, None], padded.to(root_B)], 1)
    if all(len(chain) == most for chain in chains):
        return tokens_BN, None
    length_B = torch.tensor(list(map(len, chains)), device=root_B.device)
    return tokens_BN, torch.arange(most + 1, device=root_B.device) <= length_B[:, None]


def _with_front(draft: Draft, forced: Sequence[Sequence[int]]) -> Draft:
    """A chosen chain with forced tokens in front: what it has after them stays if it agrees with
    them."""
    chains = []
    drafted = zip(draft.tokens_BN.tolist(), draft.num_drafted_B.tolist(), forced, strict=True)
    for tokens, num, front in drafted:
        chain = tokens[1 : num + 1]
        agreed = sum(1 for _ in takewhile(bool, map(eq, chain, front)))
        chains.append(chain if agreed == min(len(chain), len(front)) else list(front))
        if len(chains[-1]) < len(front):
            chains[-1] = list(front)
    tokens_BN, mask_BN = _table(draft.tokens_BN[:, 0], chains)
    return Draft.chain(tokens_BN, mask_BN, None, "chosen")
