"""Compares speculative with plain decoding: the speed, and where two greedy outputs first differ.

In exact arithmetic both greedy outputs are equal. In bfloat16 or float32 a forward pass over
several tokens may round differently from a pass over one, and two nearly equal logits change
places. Such a near-tie is reported with its logit gap. A larger gap is a bug, and the command
fails.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine import Engine, Result

_MAX_ULPS = 4  # a gap of up to so many rounding steps of the larger logit is a near-tie
_MIN_TOLERANCE = 1e-4  # for float32, where rounding errors add up over many small steps


@dataclass(frozen=True)
class FirstDifference:
    """The first position at which two greedy outputs differ.

    Attributes:
        position: index among the new tokens, from 0.
        plain: text of plain decoding's token there; None if that output has ended.
        speculative: likewise for the speculative output.
        gap: difference of the target's logits of both tokens; None if one output is a prefix of
            the other.
        near_tie: whether rounding explains the difference.
        dtype: of the target.
    """

    position: int
    plain: str | None
    speculative: str | None
    gap: float | None
    near_tie: bool
    dtype: str

    def __str__(self) -> str:
        if self.gap is None:
            return f"one ends at token {self.position}, the other continues"
        what = f"a near-tie in {self.dtype}" if self.near_tie else f"NOT a near-tie in {self.dtype}"
        return (
            f"differ from token {self.position}: {self.plain!r} or {self.speculative!r}, "
            f"logit gap {self.gap:.3g}, {what}"
        )


@dataclass(frozen=True)
class Comparison:
    """A result compared with plain decoding of the same prompt.

    Attributes:
        plain: the result of plain decoding.
        speedup: ratio of tokens per second to plain decoding's.
        comparable: whether both outputs must be equal: greedy decoding by a lossless method.
        first_difference: where they differ; None if they are equal or not comparable.
    """

    plain: "Result"
    speedup: float
    comparable: bool
    first_difference: FirstDifference | None

    @property
    def failed(self) -> bool:
        """Whether the outputs differ by more than rounding explains."""
        return self.first_difference is not None and not self.first_difference.near_tie

    def as_dict(self) -> dict[str, Any]:
        """The value of ``comparison`` in the document of ``--json``."""
        difference = self.first_difference
        return {
            "text": self.plain.text,
            "token_ids": list(self.plain.token_ids),
            "finish_reason": self.plain.finish_reason,
            "stats": self.plain.stats.as_dict(),
            "speedup": self.speedup,
            "identical": difference is None if self.comparable else None,
            "first_difference": None if difference is None else asdict(difference),
        }


def against_plain(engine: "Engine", result: "Result", plain: "Result", greedy: bool) -> Comparison:
    """Compares a result of ``engine`` with plain decoding of the same prompt."""
    speed = plain.stats.tokens_per_second
    comparable = greedy and engine.verifier_at(0).lossless
    return Comparison(
        plain,
        result.stats.tokens_per_second / speed if speed else 0.0,
        comparable,
        first_difference(engine, plain, result) if comparable else None,
    )


def first_difference(
    engine: "Engine", plain: "Result", speculative: "Result"
) -> FirstDifference | None:
    """The first position at which two greedy continuations of one prompt differ, if any."""
    ours, theirs = plain.token_ids, speculative.token_ids
    shorter = min(len(ours), len(theirs))
    at = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    if at == len(ours) == len(theirs):
        return None
    tokens = _token_text(engine, ours, at), _token_text(engine, theirs, at)
    dtype = str(engine.target.dtype).removeprefix("torch.")
    if at == shorter:
        return FirstDifference(at, *tokens, None, False, dtype)
    gap, tolerance = _gap(engine, plain.prompt_ids, ours[:at], ours[at], theirs[at])
    return FirstDifference(at, *tokens, gap, gap <= tolerance, dtype)


def _gap(
    engine: "Engine", prompt: Sequence[int], output: Sequence[int], one: int, other: int
) -> tuple[float, float]:
    """The gap between the logits of two next tokens, and the largest gap of a near-tie."""
    import torch

    target = engine.target
    with torch.inference_mode():
        logits_V = target.logits_after(prompt, output).double()
    first, second = float(logits_V[one]), float(logits_V[other])
    step = torch.finfo(target.dtype).eps * max(abs(first), abs(second))
    return abs(first - second), max(_MAX_ULPS * step, _MIN_TOLERANCE)


def _token_text(engine: "Engine", token_ids: Sequence[int], at: int) -> str | None:
    if at >= len(token_ids):
        return None
    if engine.target.tokenizer is None:
        return str(token_ids[at])
    return str(engine.target.tokenizer.decode([token_ids[at]]))
