"""A draft model that reads the target's output in tokens of its own vocabulary.

The host converts what the target commits into the draft's tokens, row by row. The draft's cache
keeps the tokens that stay the same, drafted ones included, and is rolled back to the first that
differs: ``cached`` is the length of the common prefix of the cache's tokens and the row's tokens.
Subclasses define the conversion (``_append``).

Reads the device twice per round: the drafted tokens, and those committed since.

Legend: B rows, K tokens fed or drafted, T context length, U the draft's vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.core import Capabilities, Context, Draft, Scores, Verdict
from outrider.drafters.chain.model import ModelBacked, ModelState
from outrider.runtime import HFModel, KVCache
from outrider.runtime.hf.vocabulary_bridge import Bridge

LOOK_BEHIND = 10
"""How many tokens before appended text may be tokenised again together with it."""


@dataclass
class DraftRow:
    """One row in the draft model's tokens.

    Attributes:
        tokens: the draft's tokens for everything committed but the pending bytes; never empty.
        known: number of target tokens that have been converted.
        pending: bytes of a last character that is not complete yet.
        tail: the target's last tokens.
        drafted: the draft's tokens drafted behind ``tokens``.
        cached: how many of ``tokens`` the cache holds.
        fed: how many of ``drafted`` the cache holds besides.
    """

    tokens: list[int]
    known: int
    tail: list[int]
    cached: int
    pending: bytes = b""
    drafted: list[int] = field(default_factory=list)
    fed: int = 0


class FollowState(ModelState):
    """The draft model's cache, and the rows in its tokens.

    Attributes:
        rows: the rows.
        drafted_BK: the draft's tokens of the last round, until the host has read them.
    """

    def __init__(self, cache: KVCache, rows: list[DraftRow]) -> None:
        super().__init__(cache)
        self.rows = rows
        self.drafted_BK: Tensor | None = None

    def settle(self) -> None:
        """Reads the last drafted tokens from the device."""
        if self.drafted_BK is not None:
            for row, tokens in zip(self.rows, self.drafted_BK.tolist(), strict=True):
                row.drafted, row.fed = tokens, min(self.fed, len(tokens))
            self.drafted_BK = None

    def keep(self, rows: Sequence[int]) -> None:
        self.settle()
        self.cache.keep(rows)
        self.rows = [self.rows[row] for row in rows]


class Follower(ModelBacked, ABC):
    """Shared by drafters whose model has a vocabulary of its own.

    Attributes:
        bridge: converts between the target's vocabulary and the draft's.
    """

    bridge: Bridge

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        return replace(
            super().capabilities,
            full_chains=False,
            handles_context_limit=True,
            rewindable=False,
            own_vocabulary=True,
        )

    def start(self, context: Context) -> FollowState:
        tokens_BT = context.tokens_BT.tolist()
        rows_and_lengths = zip(tokens_BT, context.lengths, strict=True)
        prompts = [tuple(row[:length]) for row, length in rows_and_lengths]
        begun = {prompt: self._begin(prompt)[: self.model.limit] for prompt in {*prompts}}
        converted = [list(begun[prompt]) for prompt in prompts]
        rows = [
            DraftRow(tokens, len(prompt), list(prompt[-LOOK_BEHIND:]), len(tokens) - 1)
            for tokens, prompt in zip(converted, prompts, strict=True)
        ]
        zeros = [0] * len(rows)
        sources = context.sources
        if sources is not None:
            longest = self.model.limit
            sources = [tuple(self.bridge.translate(source)[:longest]) for source in sources]
        own = Context.start(converted, context.distribution, zeros, zeros, context.device, sources)
        own.health = context.health
        return FollowState(self.model.start(own), rows)

    def commit(self, state: ModelState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Does nothing: the next round reads what was committed."""

    def join(self, state: ModelState, other: ModelState) -> None:
        super().join(state, other)
        assert isinstance(state, FollowState)
        assert isinstance(other, FollowState)
        state.rows = state.rows + other.rows

    def _begin(self, prompt: Sequence[int]) -> list[int]:
        """A prompt in the draft's tokens; an encoder-decoder's begins with its decoder prompt."""
        if self.model.decoder_prompt is None:
            return self.bridge.translate(prompt)
        return [*self.model.decoder_prompt, *self.bridge.convert(prompt[1:], b"")[0]]

    @abstractmethod
    def _append(self, row: DraftRow, tokens: Sequence[int], drafted: Sequence[int]) -> None:
        """Appends committed tokens of the target to ``row.tokens``, converted. May tokenise the
        last ``LOOK_BEHIND`` tokens again; ``drafted`` is what the draft model drafted there."""

    def _catch_up(self, state: ModelState, context: Context) -> Tensor:
        """Feeds the committed tokens that the cache lacks; the logits behind them, (B, U)."""
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
        """Converts what was committed since the last round, and finds what the cache may keep."""
        first = min(row.known for row in state.rows)
        new_BK = context.tokens_BT[:, first : max(context.lengths)].tolist()
        for row, new, length in zip(state.rows, new_BK, context.lengths, strict=True):
            new = new[row.known - first : length - first]
            border = max(0, len(row.tokens) - LOOK_BEHIND)
            held = row.tokens[border : row.cached] + row.drafted[: row.fed]
            drafted, row.drafted, row.fed = row.drafted, [], 0
            if new and len(row.tokens) < self.model.limit:
                self._append(row, new, drafted)
                del row.tokens[self.model.limit :]
            row.known, row.tail = length, (row.tail + new)[-LOOK_BEHIND:]
            same = border + _common(held, row.tokens[border:])
            row.cached = min(same, len(row.tokens) - 1)

    def _room_B(self, state: FollowState, device: torch.device) -> Tensor:
        """How many tokens the draft model's context has room for, (B,). A row that fills the
        context goes on without drafts."""
        room = [self.model.limit - len(row.tokens) for row in state.rows]
        return torch.tensor(room, device=device)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
