"""What a generation did and what it cost.

Three numbers of the field that are often confused, all reported: the *acceptance rate* is accepted
over drafted tokens; the *acceptance length* is emitted tokens per target pass, bonus included
(1 in plain decoding); Leviathan's *α* is the mean of the overlap Σ min(p, q) over the positions
that token-level rejection sampling verifies. α says how near the draft's distribution is to the
target's, and does not depend on the rule; ``round_counts.py`` defines it and shows why it is
unbiased.

A lossy rule emits tokens from a distribution π of its own. Its divergences from the target's p are
summed over the positions of an output: both KL divergences of outputs are the sums of those of
their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import zip_longest

from outrider.engine.round_counts import RoundCounts


@dataclass
class Stats:
    """RoundCounts and seconds; they add up over requests.

    Attributes:
        rounds: target passes, prefill not counted.
        drafted: drafted tokens, cut at the end of the output; of a tree, all its nodes.
        accepted: of these, the ones that were emitted.
        forced: of the accepted ones, those that a grammar had forced, so that nothing was run to
            draft them.
        emitted: all tokens emitted.
        overlap: sum over drafted positions of an unbiased estimate of Σ min(p, q), each weighted by
            the probability that token-level rejection sampling would come to it.
        reached: sum of these weights. Neither sum counts what lies after the end of a sequence.
        verified: number of positions that the rule itself came to.
        tried_at: verified positions by depth in the draft.
        accepted_at: accepted tokens by depth.
        reused: prompt tokens whose keys and values the target had kept of an earlier sequence
            (``prefix_cache``), so that it did not read them.
        texts: number of outputs.
        measured: tokens at whose position the distribution π of a lossy rule was compared with the
            target's p.
        kl: sum of KL(p‖π) over these positions, in nats; 0 elsewhere, where tokens follow p.
        reverse_kl: the same of KL(π‖p).
        tv: the same of the total variation.
        draft_seconds: in forward passes of the draft model.
        target_seconds: in forward passes of the target.
        other_seconds: everything else.
        draft_lengths: rounds by the length of draft that the governor asked for, from 0; empty
            without a governor.
        probes: of these, the rounds that only tried a length, to measure it.
        believed_rounds: of these, the rounds of which the governor expected anything; all but the
            first rounds of an engine.
        believed_tokens: tokens that it expected these rounds to emit.
        believed_seconds: seconds that it expected them to take.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    emitted: int = 0
    overlap: float = 0.0
    reached: float = 0.0
    verified: int = 0
    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    reused: int = 0
    texts: int = 0
    measured: int = 0
    kl: float = 0.0
    reverse_kl: float = 0.0
    tv: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    other_seconds: float = 0.0
    draft_lengths: list[int] = field(default_factory=list)
    probes: int = 0
    believed_rounds: int = 0
    believed_tokens: float = 0.0
    believed_seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per target pass."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def alpha(self) -> float:
        """Leviathan's α, E[Σ min(p, q)]: ``overlap / reached``, an unbiased estimate over an
        unbiased estimate whatever the rule; 0 where nothing was drafted.

        A copied or otherwise chosen token is a point mass q, so its overlap is p(x). At temperature
        0 the overlap is 1 where the drafted token is the target's argmax, else 0. In a tree it is
        that of each node's first child. A stop string, which only the decoded text shows, ends a
        draft where its tokens were accepted, and not where they were rejected.
        """
        return self.overlap / self.reached if self.reached else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of tokens accepted at each depth, of those that were verified there."""
        pairs = zip_longest(self.accepted_at, self.tried_at, fillvalue=0)
        return [a / t if t else 0.0 for a, t in pairs]

    @property
    def kl_per_token(self) -> float:
        """KL(p‖π) per emitted token, in nats."""
        return self.kl / self.emitted if self.emitted else 0.0

    @property
    def reverse_kl_per_token(self) -> float:
        """KL(π‖p) per emitted token, in nats."""
        return self.reverse_kl / self.emitted if self.emitted else 0.0

    @property
    def tv_per_token(self) -> float:
        """Total variation per emitted token."""
        return self.tv / self.emitted if self.emitted else 0.0

    @property
    def kl_per_text(self) -> float:
        """KL(p‖π) per output, in nats."""
        return self.kl / self.texts if self.texts else 0.0

    @property
    def probe_share(self) -> float:
        """Share of the governor's rounds that only tried a length; 0 without a governor."""
        governed = sum(self.draft_lengths)
        return self.probes / governed if governed else 0.0

    @property
    def believed_tokens_per_round(self) -> float:
        """Tokens that the governor expected of a round; compare ``acceptance_length``."""
        return self.believed_tokens / self.believed_rounds if self.believed_rounds else 0.0

    @property
    def believed_tokens_per_second(self) -> float:
        """Tokens per second that the governor expected; compare ``tokens_per_second``, which
        includes the prefill."""
        return self.believed_tokens / self.believed_seconds if self.believed_seconds else 0.0

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.target_seconds + self.other_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.seconds if self.seconds else 0.0

    def count(self, counts: RoundCounts, accepted: int, kept: int) -> None:
        """Adds one round of which the first ``kept`` tokens were emitted.

        An output that ends inside the accepted tokens drops the rest of the round: its drafted and
        accepted tokens end there, too.
        """
        drafted, depth = counts.drafted, counts.depth
        tried = accepted + counts.rejected
        if kept <= accepted:
            drafted = depth = accepted = tried = kept
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.forced += min(counts.forced, accepted)
        self.emitted += kept
        self.overlap += sum(counts.overlap[:depth])
        self.reached += sum(counts.reached[:depth])
        self.verified += tried
        for kl, reverse_kl, tv in counts.divergences[:tried]:
            self.measured += 1
            self.kl += kl
            self.reverse_kl += reverse_kl
            self.tv += tv
        _grow(self.tried_at, depth)
        _grow(self.accepted_at, depth)
        for depth in range(tried):
            self.tried_at[depth] += 1
        for depth in range(accepted):
            self.accepted_at[depth] += 1

    def spend(self, draft: float, target: float, total: float) -> None:
        """Adds seconds; those of neither draft nor target are other."""
        self.draft_seconds += draft
        self.target_seconds += target
        self.other_seconds += max(0.0, total - draft - target)

    def govern(
        self, length: int, probe: bool, believed: tuple[float, float] | None, share: float
    ) -> None:
        """Counts a round for which the governor asked for a draft of this length.

        Args:
            length: of the draft.
            probe: whether it was only tried.
            believed: tokens and seconds that the governor expected of the round; None of the first.
            share: the row's of these.
        """
        if length >= len(self.draft_lengths):
            _grow(self.draft_lengths, length + 1)
        self.draft_lengths[length] += 1
        self.probes += probe
        if believed is not None:
            self.believed_rounds += 1
            self.believed_tokens += share * believed[0]
            self.believed_seconds += share * believed[1]

    def as_dict(self) -> dict[str, float | int | str | list[float] | list[int]]:
        """All numbers, derived ones included, for JSON (where infinity is the word ``inf``)."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "forced": self.forced,
            "emitted": self.emitted,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
            "alpha": self.alpha,
            "acceptance_by_position": self.acceptance_by_position,
            "reused": self.reused,
            "texts": self.texts,
            "measured": self.measured,
            "kl": _finite(self.kl),
            "reverse_kl": _finite(self.reverse_kl),
            "tv": self.tv,
            "kl_per_token": _finite(self.kl_per_token),
            "reverse_kl_per_token": _finite(self.reverse_kl_per_token),
            "tv_per_token": self.tv_per_token,
            "draft_seconds": self.draft_seconds,
            "target_seconds": self.target_seconds,
            "other_seconds": self.other_seconds,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "draft_lengths": self.draft_lengths,
            "probe_share": self.probe_share,
            "believed_tokens_per_round": self.believed_tokens_per_round,
            "believed_tokens_per_second": self.believed_tokens_per_second,
        }

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """The sum over requests."""
        total = cls()
        for part in parts:
            for each in fields(cls):
                mine, theirs = getattr(total, each.name), getattr(part, each.name)
                if isinstance(mine, list):
                    _grow(mine, len(theirs))
                    for depth, number in enumerate(theirs):
                        mine[depth] += number
                else:
                    setattr(total, each.name, mine + theirs)
        return total


def _finite(x: float) -> float | str:
    return x if math.isfinite(x) else "inf"


def _grow(numbers: list[int], length: int) -> None:
    numbers.extend([0] * (length - len(numbers)))
