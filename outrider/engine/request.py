"""A request, its row while it runs, and its result, on the host."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Literal

from outrider.core.protocols import Verifier
from outrider.engine.chat import Message
from outrider.engine.round_counts import RoundCounts
from outrider.engine.stats import Stats
from outrider.engine.stop import Ending
from outrider.sampling import Sampling

Origin = Literal["accepted", "forced", "correction", "bonus", "plain"]
"""Where an emitted token came from: an accepted draft token; an accepted token that a grammar had
forced, so that nothing was run to draft it; the target's correction after a
rejected one; the target's bonus token after a fully accepted draft; the target alone, in a round
without a draft."""


@dataclass(frozen=True)
class TopLogprobs:
    """The target's most probable tokens at one position, best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Event:
    """What one round added to an output.

    Attributes:
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: the new tokens.
        origins: where each token came from.
        logprobs: the target's log-probability of each token; empty unless requested.
        top_logprobs: the most probable tokens at each position; empty unless requested.
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
    """A finished output.

    Attributes:
        prompt: the prompt as it was given.
        prompt_ids: its tokens.
        text: the output as text, cut before a stop string.
        token_ids: the output's tokens, the one that ended it included.
        origins, logprobs, top_logprobs, finish_reason: as in :class:`Event`.
        stats: counts and seconds. In a batch, seconds are divided equally among the rows.
    """

    prompt: str | Sequence[int] | Sequence[Message]
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
        """The sum of their statistics; the seconds are those of the whole batch."""
        return Stats.total(result.stats for result in self)


@dataclass(frozen=True)
class Request:
    """What to generate.

    Attributes:
        prompt: the prompt as it was given.
        prompt_ids: its tokens; for an encoder-decoder, the tokens that the encoder reads.
        sampling: the sampling parameters.
        number: with the seed, the key of the request's random numbers.
        decoder_prompt: the tokens that an encoder-decoder's output begins with; None for a
            decoder-only model.
        index: the position of the prompt in its call, for error messages.
        num_speculative_tokens: most tokens drafted per round, below the engine's; 0 drafts
            nothing, None as many as the engine.
        prediction: the output that the user expects, which a drafter may copy.
        rule: the rule that verifies the request where rows are sampled; None for the engine's.
        seed: of the request's random numbers: that of the sampling parameters, or one drawn.
    """

    prompt: str | Sequence[int] | Sequence[Message]
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    number: int
    decoder_prompt: tuple[int, ...] | None = None
    index: int = 0
    num_speculative_tokens: int | None = None
    prediction: tuple[int, ...] = ()
    rule: Verifier | None = None
    seed: int = 0

    @property
    def is_repeatable(self) -> bool:
        """Whether it is sampled with a seed of the user's, so that its output must not depend on
        the machine's speed or on other requests."""
        return self.sampling.seed is not None and not self.sampling.greedy

    @property
    def first_ids(self) -> tuple[int, ...]:
        """The tokens that the output continues."""
        return self.prompt_ids if self.decoder_prompt is None else self.decoder_prompt


@dataclass(eq=False)
class Row:
    """A request while it runs.

    Attributes:
        request: the request.
        ending: decides where the output ends.
        token_ids, origins, logprobs, top_logprobs: the output so far.
        stats: counts and seconds so far.
        error: what ended the request without a result; None while it runs and after it finished.
    """

    request: Request
    ending: Ending
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    stats: Stats = field(default_factory=lambda: Stats(texts=1))
    error: Exception | None = None
    _num_reported: int = field(default=0, init=False, repr=False)
    _changing: bool = field(default=False, init=False, repr=False)
    _lock: Any = field(default_factory=RLock, init=False, repr=False, compare=False)

    @property
    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.ending.reason is not None

    @property
    def over(self) -> bool:
        """Whether no more rounds follow: the output is complete, or an error ended it."""
        return self.finished or self.error is not None

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """The tokens that the output continues, then the output so far."""
        return (*self.request.first_ids, *self.token_ids)

    @property
    def resumable(self) -> bool:
        """Whether another batch can continue the row from its tokens. A row cannot be resumed if an
        exception interrupted :meth:`take`."""
        return not self._changing

    def take(
        self,
        tokens: list[int],
        counts: RoundCounts,
        logprobs: list[float],
        top_logprobs: list[TopLogprobs],
    ) -> int:
        """Appends a round's tokens (the accepted ones, then the target's own) up to the end of the
        output; returns how many were kept."""
        with self._lock:
            self._changing = True
            accepted = len(tokens) - 1
            last: Origin = "plain"
            if counts.drafted:
                last = "correction" if counts.rejected else "bonus"
            kept = self.ending.take(tokens)
            forced: list[Origin] = ["forced"] * min(counts.forced, accepted)
            drafted: list[Origin] = ["accepted"] * (accepted - len(forced))
            origins = [*forced, *drafted, last][:kept]
            self.stats.count(counts, accepted, kept)
            self.token_ids += tokens[:kept]
            self.origins += origins
            self.logprobs += logprobs[:kept]
            self.top_logprobs += top_logprobs[:kept]
            self._changing = False
        return kept

    def event(self) -> Event:
        """What was added since the last call."""
        with self._lock:
            new, self._num_reported = slice(self._num_reported, None), len(self.token_ids)
            return Event(
                self.ending.shown(),
                tuple(self.token_ids[new]),
                tuple(self.origins[new]),
                tuple(self.logprobs[new]),
                tuple(self.top_logprobs[new]),
                self.ending.reason,
            )

    def event_after(self, num_tokens: int) -> Event | None:
        """What was added since the last call, for another thread than that of the rounds; None if
        the output has more tokens than these by now."""
        with self._lock:
            return self.event() if len(self.token_ids) == num_tokens else None

    def result(self) -> Result:
        """The output; ``finish_reason`` is ``cancelled`` if it is not complete."""
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
    """A number per request, derived from its prompt and the count of equal prompts before it.

    A prompt therefore has the same output alone and in any batch, in any call and process, and
    equal prompts of one call have different outputs.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    numbers = []
    for prompt in prompts:
        key = repr((prompt, seen[prompt])).encode()
        numbers.append(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()))
        seen[prompt] += 1
    return numbers
