"""One output of a request as far as it came, and what a response says about it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine import Row, Stats, TopLogprobs
from outrider.engine.request import Origin
from outrider.engine.token_texts import TokenTexts
from outrider.serve.fields import SpeculationFields
from outrider.serve.names import TokenNames
from outrider.serve.rounds import DraftedToken, RecordedRound
from outrider.serve.worker import Step

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
LEAST = -9999.0
"""What JSON says for a log-probability of minus infinity, as vLLM does."""


@dataclass
class Part:
    """New text and tokens of an output: those of some rounds, or all of them.

    Attributes:
        text, token_ids, origins, logprobs, top: as in :class:`outrider.engine.Event`.
        pieces: the text token by token, with the origin of each, where the request wants it.
        rounds: what the rounds did, where the request wants it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    pieces: list[tuple[str, Origin]] = field(default_factory=list)
    rounds: list[RecordedRound] = field(default_factory=list)

    @classmethod
    def of(cls, step: Step, texts: TokenTexts | None = None) -> "Part":
        """What a step added; ``texts`` splits it into pieces."""
        event = step.event
        return cls(
            event.text,
            list(event.token_ids),
            list(event.origins),
            list(event.logprobs),
            list(event.top_logprobs),
            [] if texts is None else list(texts.split(event)),
            list(step.recorded),
        )

    def add(self, other: "Part") -> None:
        """Appends a later part."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.origins += other.origins
        self.logprobs += other.logprobs
        self.top += other.top
        self.pieces += other.pieces
        self.rounds += other.rounds


@dataclass
class Choice:
    """An output.

    Attributes:
        part: all of it so far.
        rounds: the tokens drafted and accepted in each round.
        row: the engine's row, which is final once ``finish_reason`` is set.
        finish_reason: ``stop`` or ``length``; None while it goes on.
        texts: splits the text into pieces, where the request wants them.
    """

    part: Part = field(default_factory=Part)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    row: Row | None = None
    finish_reason: str | None = None
    texts: TokenTexts | None = None

    def take(self, step: Step) -> Part:
        """Adds a step; what it added."""
        part = Part.of(step, self.texts)
        self.part.add(part)
        self.rounds += [(done.drafted, done.accepted) for done in step.done]
        self.row = step.row
        reason = step.event.finish_reason
        self.finish_reason = None if reason is None else FINISH_REASONS[reason]
        return part

    @property
    def stats(self) -> Stats:
        """The statistics of a finished output."""
        return Stats() if self.row is None else self.row.stats


def wants_tokens(fields: SpeculationFields) -> bool:
    """Whether a request wants to know of single tokens, beside their text."""
    return bool(
        fields.return_token_ids
        or fields.return_token_origins
        or fields.return_pieces
        or fields.return_rounds
    )


def token_fields(part: Part, fields: SpeculationFields, names: TokenNames) -> dict[str, object]:
    """What a response says of a part's tokens, as far as the request wants it."""
    told: dict[str, object] = {}
    if fields.return_token_ids:
        told["token_ids"] = part.token_ids
    if fields.return_token_origins:
        told["token_origins"] = part.origins
    if fields.return_pieces:
        told["pieces"] = [{"text": text, "origin": origin} for text, origin in part.pieces]
    if fields.return_rounds:
        told["rounds"] = [_round(each, names) for each in part.rounds]
    return told


def _round(round_: RecordedRound, names: TokenNames) -> dict[str, object]:
    token = round_.next_token_id
    return {
        "drafted": [_drafted(each, names) for each in round_.drafted],
        "next": None
        if token is None
        else {
            "token_id": token,
            "token": names.key(token),
            "p": round_.next_p,
            "logprob": max(round_.next_logprob, LEAST),
            "origin": round_.next_origin,
        },
    }


def _drafted(token: DraftedToken, names: TokenNames) -> dict[str, object]:
    return {
        "token_id": token.token_id,
        "token": names.key(token.token_id),
        "parent": token.parent,
        "p": token.p,
        "q": token.q,
        "logprob": max(token.logprob, LEAST),
        "acceptance": token.acceptance,
        "outcome": token.outcome,
    }


def usage(
    prompts: Sequence[Sequence[int]], choices: Sequence[Choice], *, predicts: bool
) -> dict[str, object]:
    """The token counts of a request.

    Args:
        prompts: the prompts, each of which counts once. Of its tokens, those are cached that none
            of its outputs had to read.
        choices: the outputs, as many of each prompt, in the order of the prompts.
        predicts: whether drafts were copied from an expected output.
    """
    num_prompt_tokens = sum(map(len, prompts))
    each = max(1, len(choices) // len(prompts))
    reused = [choice.stats.reused for choice in choices]
    cached = sum(min(reused[first : first + each]) for first in range(0, len(reused), each))
    num_output = sum(len(choice.part.token_ids) for choice in choices)
    accepted = drafted = 0
    if predicts:
        forced = sum(choice.stats.forced for choice in choices)  # which nobody predicted
        accepted = sum(a for choice in choices for _, a in choice.rounds) - forced
        drafted = sum(d for choice in choices for d, _ in choice.rounds) - forced
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output,
        "total_tokens": num_prompt_tokens + num_output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def speculation_metrics(choice: Choice, most: int, *, detailed: bool) -> dict[str, object]:
    """How a finished output was drafted, in vLLM's fields; rounds without a draft do not count.

    ``num_forced_tokens``, ``alpha``, and for lossy rules the divergences per token, are Outrider's
    own.

    Args:
        choice: the output.
        most: γ.
        detailed: also list what was drafted and accepted round by round.
    """
    rounds = [(drafted, accepted) for drafted, accepted in choice.rounds if drafted]
    drafted, accepted = sum(d for d, _ in rounds), sum(a for _, a in rounds)
    longest = max([most, *(d for d, _ in rounds)])
    by_length: dict[str, list[int]] = {}
    for length in sorted({d for d, _ in rounds}):
        counts = Counter(a for d, a in rounds if d == length)
        by_length[str(length)] = [counts[a] for a in range(length + 1)]
    counts = Counter(a for _, a in rounds)
    stats = choice.stats
    metrics: dict[str, object] = {
        "mean_acceptance_length": 1 + accepted / len(rounds) if rounds else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [counts[a] for a in range(longest + 1)],
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": len(rounds),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": most,
        "num_forced_tokens": stats.forced,
        "alpha": stats.alpha,
    }
    if stats.measured:
        metrics["kl_per_token"] = stats.kl_per_token if math.isfinite(stats.kl) else None
        metrics["reverse_kl_per_token"] = (
            stats.reverse_kl_per_token if math.isfinite(stats.reverse_kl) else None
        )
        metrics["tv_per_token"] = stats.tv_per_token
    if detailed:
        metrics["per_step_accepted"] = [a for _, a in rounds]
        metrics["per_step_drafted"] = [d for d, _ in rounds]
    return {"speculative_decoding": metrics}


def chat_logprobs(part: Part, names: TokenNames) -> dict[str, object]:
    """Log-probabilities as chat completions have them."""

    def named(token: int, logprob: float) -> dict[str, object]:
        return {
            "token": names.text(token),
            "logprob": max(logprob, LEAST),
            "bytes": names.bytes(token),
        }

    tops = part.top or [TopLogprobs((), ())] * len(part.token_ids)
    rows = zip(part.token_ids, part.logprobs, tops, strict=True)
    content = [
        named(token, logprob)
        | {"top_logprobs": [named(*each) for each in zip(top.token_ids, top.logprobs, strict=True)]}
        for token, logprob, top in rows
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    part: Part, num_top: int, offset: int, names: TokenNames, *, begins: bool = False
) -> dict[str, object]:
    """Log-probabilities as text completions have them. The chosen token is always among the top
    ones, so that there may be one more than was asked for.

    Args:
        part: tokens with their log-probabilities.
        num_top: how many of the most probable tokens to name; with 0 none are.
        offset: characters before the part.
        names: the tokens' texts.
        begins: whether the first token begins the prompt, so that nothing precedes it.
    """
    tokens = [names.key(token) for token in part.token_ids]
    offsets, at = [], offset
    for token in part.token_ids:
        offsets.append(at)
        at += len(names.text(token))
    logprobs: list[float | None] = [max(value, LEAST) for value in part.logprobs]
    tops: list[dict[str, float] | None] | None = None
    if num_top:
        rows = zip(tokens[begins:], part.logprobs, part.top, strict=True)
        tops = [_top(token, logprob, top, names) for token, logprob, top in rows]
    if begins:
        logprobs.insert(0, None)
        tops = None if tops is None else [None, *tops]
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _top(token: str, logprob: float, top: TopLogprobs, names: TokenNames) -> dict[str, float]:
    best: dict[str, float] = {}
    for each, value in zip(top.token_ids, top.logprobs, strict=True):
        best.setdefault(names.key(each), max(value, LEAST))
    best.setdefault(token, max(logprob, LEAST))
    return best
