"""One request, from prompt to result, on the host."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from outrider.engine.counts import Counts
from outrider.engine.stats import Stats
from outrider.engine.stop import Ending
from outrider.sampling import Sampling

Origin = Literal["accepted", "correction", "bonus", "plain"]
"""Where an emitted token came from: an accepted draft; the target's correction after a refused
one; the target's bonus after a fully accepted draft; the target alone, nothing drafted."""


@dataclass(frozen=True)
class TopLogprobs:
    """The target's most probable tokens at one place, best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Event:
    """What a round added to a text.

    Attributes:
        text: new text; may be empty while a character or a possible stop string is incomplete.
        token_ids: the tokens.
        origins: where each came from.
        logprobs: the target's log-probability of each; empty unless asked for.
        top_logprobs: the most probable tokens at each place; empty unless asked for.
        finish_reason: None until the last event; then ``eos``, ``stop``, ``length`` or ``context``
            (the model's context is full).
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True)
class Result:
    """A finished text.

    Attributes:
        prompt: as it was given.
        prompt_ids: its tokens.
        text: the continuation, cut before a stop string.
        token_ids: its tokens, up to the one that ended it.
        origins, logprobs, top_logprobs, finish_reason: as in :class:`Event`.
        stats: what it took. In a batch, seconds are shared out equally among the rows.
    """

    prompt: str | Sequence[int]
    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: str
    stats: Stats


class Results(list[Result]):
    """The results of a batch, in the order of its prompts."""

    @property
    def stats(self) -> Stats:
        """Their statistics added up; seconds are those of the whole batch."""
        return Stats.total(result.stats for result in self)


@dataclass(frozen=True)
class Request:
    """What to generate. ``number`` is part of the key of its random numbers; ``decoder_prompt`` is
    what the text begins with where the prompt is a source, which an encoder reads; ``index`` is its
    place among the prompts of the call."""

    prompt: str | Sequence[int]
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    number: int
    decoder_prompt: tuple[int, ...] | None = None
    index: int = 0

    @property
    def first_ids(self) -> tuple[int, ...]:
        """The tokens that the text continues."""
        return self.prompt_ids if self.decoder_prompt is None else self.decoder_prompt


@dataclass
class Row:
    """A request while it runs."""

    request: Request
    ending: Ending
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    stats: Stats = field(default_factory=lambda: Stats(texts=1))
    _told: int = field(default=0, init=False, repr=False)

    @property
    def finished(self) -> bool:
        return self.ending.reason is not None

    def take(
        self,
        tokens: list[int],
        counts: Counts,
        logprobs: list[float],
        top_logprobs: list[TopLogprobs],
    ) -> int:
        """Adds a round's tokens (accepted ones, then the target's own), cut where the text ends;
        returns how many were kept."""
        accepted = len(tokens) - 1
        last: Origin = "plain"
        if counts.drafted:
            last = "correction" if counts.refused else "bonus"
        kept = self.ending.take(tokens)
        draft: Origin = "accepted"
        origins = [*[draft] * accepted, last][:kept]
        self.stats.count(counts, accepted, kept)
        self.token_ids += tokens[:kept]
        self.origins += origins
        self.logprobs += logprobs[:kept]
        self.top_logprobs += top_logprobs[:kept]
        return kept

    def event(self) -> Event:
        """What was added since this was asked last."""
        new, self._told = slice(self._told, None), len(self.token_ids)
        return Event(
            self.ending.shown(),
            tuple(self.token_ids[new]),
            tuple(self.origins[new]),
            tuple(self.logprobs[new]),
            tuple(self.top_logprobs[new]),
            self.ending.reason,
        )

    def result(self) -> Result:
        """The finished text."""
        return Result(
            self.request.prompt,
            self.request.prompt_ids,
            self.ending.text,
            tuple(self.token_ids),
            tuple(self.origins),
            tuple(self.logprobs),
            tuple(self.top_logprobs),
            self.ending.reason or "cancelled",
            self.stats,
        )


def request_numbers(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """A number per request that depends on its prompt and on equal prompts before it, only.

    So a prompt gives the same text alone and in any batch, and equal prompts different texts.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    numbers = []
    for prompt in prompts:
        key = repr((prompt, seen[prompt])).encode()
        numbers.append(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()))
        seen[prompt] += 1
    return numbers
