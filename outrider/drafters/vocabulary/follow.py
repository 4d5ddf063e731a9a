"""A draft model that follows the target's text in tokens of its own.

What the target commits is told to the draft model in its own vocabulary, row by row on the host.
Its cache keeps the tokens that stay the same, those it drafted itself among them, and is rolled
back to the first that does not: ``cached`` is the common prefix of what the cache holds and what
the text has become. How text is told is the drafter's business (``_tell``).

Two small reads of the device per round: the tokens drafted, and those committed since.

Legend: B rows, K columns fed or drafted tokens, T context, U the draft's vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core import Context, Draft, Scores, Verdict
from outrider.drafters.chain.model import ModelBacked, ModelState
from outrider.runtime import KVCache
from outrider.runtime.hf.vocabulary_bridge import Bridge

LOOK_BEHIND = 10
"""Tokens before a place that may be tokenised anew when text is added there."""


@dataclass
class Row:
    """One row's text as the draft model knows it.

    Attributes:
        tokens: the draft's, for all committed text but what is pending; never empty.
        known: tokens of the target that they stand for.
        pending: bytes of a last character that is not complete yet.
        tail: the target's last tokens.
        drafted: the draft's tokens that were drafted behind ``tokens``.
        cached: how many of ``tokens`` the cache holds.
        fed: how many of ``drafted`` it holds besides.
    """

    tokens: list[int]
    known: int
    tail: list[int]
    cached: int
    pending: bytes = b""
    drafted: list[int] = field(default_factory=list)
    fed: int = 0


class FollowState(ModelState):
    """The draft model's cache, and the text that it is about.

    Attributes:
        rows: one per row.
        drafted_BK: the draft's tokens of the last round, until they are read.
    """

    def __init__(self, cache: KVCache, rows: list[Row]) -> None:
        super().__init__(cache)
        self.rows = rows
        self.drafted_BK: Tensor | None = None

    def settle(self) -> None:
        """Reads what was drafted last."""
        if self.drafted_BK is not None:
            for row, tokens in zip(self.rows, self.drafted_BK.tolist(), strict=True):
                row.drafted, row.fed = tokens, min(self.fed, len(tokens))
            self.drafted_BK = None

    def keep(self, rows: Sequence[int]) -> None:
        self.settle()
        self.cache.keep(rows)
        self.rows = [self.rows[row] for row in rows]


class Follower(ModelBacked, ABC):
    """What drafters with a vocabulary of their own share.

    Attributes:
        bridge: between the target's vocabulary and theirs.
        heeds_context: a row whose text, in their tokens, fills the draft model's context goes on
            without drafts.
    """

    bridge: Bridge
    heeds_context = True

    def start(self, context: Context) -> FollowState:
        tokens_BT = context.tokens_BT.tolist()
        rows_and_lengths = zip(tokens_BT, context.lengths, strict=True)
        prompts = [tuple(row[:length]) for row, length in rows_and_lengths]
        begun = {prompt: self._begin(prompt)[: self.model.limit] for prompt in {*prompts}}
        told = [list(begun[prompt]) for prompt in prompts]
        rows = [
            Row(tokens, len(prompt), list(prompt[-LOOK_BEHIND:]), len(tokens) - 1)
            for tokens, prompt in zip(told, prompts, strict=True)
        ]
        nothing = [0] * len(rows)
        sources = context.sources
        if sources is not None:
            longest = self.model.limit
            sources = [tuple(self.bridge.translate(source)[:longest]) for source in sources]
        own = Context.start(told, context.distribution, nothing, nothing, context.device, sources)
        own.health = context.health
        return FollowState(self.model.start(own), rows)

    def commit(self, state: ModelState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Nothing yet: the next round reads what was committed."""

    def join(self, state: ModelState, other: ModelState) -> None:
        super().join(state, other)
        assert isinstance(state, FollowState)
        assert isinstance(other, FollowState)
        state.rows = state.rows + other.rows

    def _begin(self, prompt: Sequence[int]) -> list[int]:
        """A prompt in the draft's tokens; a decoder's begins as decoders of its kind do."""
        if self.model.decoder_prompt is None:
            return self.bridge.translate(prompt)
        return [*self.model.decoder_prompt, *self.bridge.mated(prompt[1:], b"")[0]]

    @abstractmethod
    def _tell(self, row: Row, tokens: Sequence[int], drafted: Sequence[int]) -> None:
        """Adds the target's committed tokens to the row's text. May tokenise the last
        ``LOOK_BEHIND`` tokens anew; ``drafted`` is what the draft model wrote there itself."""

    def _catch_up(self, state: ModelState, context: Context) -> Tensor:
        """Feeds the text that the cache lacks; the draft's own logits behind it, (B, U)."""
        assert isinstance(state, FollowState)
        self._follow(state, context)
        cache, rows = state.cache, state.rows
        lacking = [len(row.tokens) - row.cached for row in rows]
        K = max(lacking)
        columns = [
            row.tokens[row.cached :] + [0] * (K - n) for row, n in zip(rows, lacking, strict=True)
        ]
        cache.lengths = [row.cached for row in rows]
        cache.length_B = torch.tensor(cache.lengths, device=context.device)
        logits_BKU = self.model.extend(cache, torch.tensor(columns, device=context.device))
        for row in rows:
            row.cached = len(row.tokens)
        cache.lengths = [row.cached for row in rows]
        cache.length_B = torch.tensor(cache.lengths, device=context.device)
        state.fed = 0
        last_B = torch.tensor(lacking, device=context.device) - 1
        return logits_BKU.gather(1, last_B[:, None, None].expand(-1, 1, logits_BKU.shape[2]))[:, 0]

    def _follow(self, state: FollowState, context: Context) -> None:
        """Tells every row what was committed since, and finds what its cache may keep."""
        first = min(row.known for row in state.rows)
        new_BK = context.tokens_BT[:, first : max(context.lengths)].tolist()
        for row, new, length in zip(state.rows, new_BK, context.lengths, strict=True):
            new = new[row.known - first : length - first]
            border = max(0, len(row.tokens) - LOOK_BEHIND)
            held = row.tokens[border : row.cached] + row.drafted[: row.fed]
            drafted, row.drafted, row.fed = row.drafted, [], 0
            if new and len(row.tokens) < self.model.limit:
                self._tell(row, new, drafted)
                del row.tokens[self.model.limit :]
            row.known, row.tail = length, (row.tail + new)[-LOOK_BEHIND:]
            same = border + _common(held, row.tokens[border:])
            row.cached = min(same, len(row.tokens) - 1)

    def _room_B(self, state: FollowState, device: torch.device) -> Tensor:
        """How many tokens the draft model's context has room for, (B,). A row whose text is longer
        than that goes on without drafts."""
        room = [self.model.limit - len(row.tokens) for row in state.rows]
        return torch.tensor(room, device=device)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
