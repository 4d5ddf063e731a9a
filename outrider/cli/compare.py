"""Speculative against plain: speed, and where two greedy texts part.

In exact arithmetic greedy texts are equal. In bfloat16 or float32 a pass over several tokens may
round differently from a pass over one, and two nearly equal logits change places. Such a near-tie
is shown with its gap; a larger gap is a mistake, and the command fails.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine import Engine, Result

_ROUNDINGS = 4  # differences of up to so many rounding steps of the larger logit are near-ties
_SLACK = 1e-4  # and anything below this, for float32, where errors add up over many small steps


@dataclass(frozen=True)
class Parting:
    """The first place where two greedy texts differ.

    Attributes:
        position: counted in new tokens, from 0.
        plain, speculative: text of the token there, or None past the end.
        gap: difference of the target's logits of the two; None when one text simply ended.
        near_tie: whether rounding explains it.
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
            return f"one ends at token {self.position}, the other goes on"
        what = f"a near-tie in {self.dtype}" if self.near_tie else f"NOT a near-tie in {self.dtype}"
        return (
            f"part at token {self.position}: {self.plain!r} or {self.speculative!r}, "
            f"logit gap {self.gap:.3g}, {what}"
        )


@dataclass(frozen=True)
class Comparison:
    """A result beside plain decoding of the same prompt.

    Attributes:
        plain: the plain result.
        speedup: tokens per second over plain's.
        comparable: whether the texts must be equal: greedy, by a lossless method.
        parting: where they are not; None when equal or not comparable.
    """

    plain: "Result"
    speedup: float
    comparable: bool
    parting: Parting | None

    @property
    def failed(self) -> bool:
        return self.parting is not None and not self.parting.near_tie

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "text": self.plain.text,
            "token_ids": list(self.plain.token_ids),
            "finish_reason": self.plain.finish_reason,
            "stats": self.plain.stats.as_dict(),
            "speedup": self.speedup,
            "identical": self.parting is None if self.comparable else None,
            "parting": None if self.parting is None else asdict(self.parting),
        }


def against_plain(engine: "Engine", result: "Result", plain: "Result", greedy: bool) -> Comparison:
    """Holds a result of ``engine`` against plain decoding."""
    speed = plain.stats.tokens_per_second
    comparable = greedy and engine.verifier_at(0).lossless
    return Comparison(
        plain,
        result.stats.tokens_per_second / speed if speed else 0.0,
        comparable,
        first_parting(engine, plain, result) if comparable else None,
    )


def first_parting(engine: "Engine", plain: "Result", speculative: "Result") -> Parting | None:
    """Where two greedy continuations of one prompt differ first."""
    ours, theirs = plain.token_ids, speculative.token_ids
    shorter = min(len(ours), len(theirs))
    at = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    dtype = str(engine.target.dtype).removeprefix("torch.")
    if at == shorter:
        if len(ours) == len(theirs):
            return None
        return Parting(at, _text(engine, ours, at), _text(engine, theirs, at), None, False, dtype)
    gap, tolerance = _gap(engine, plain.prompt_ids, ours[:at], ours[at], theirs[at])
    words = _text(engine, ours, at), _text(engine, theirs, at)
    return Parting(at, *words, gap, gap <= tolerance, dtype)


def _gap(
    engine: "Engine", prompt: Sequence[int], text: Sequence[int], one: int, other: int
) -> tuple[float, float]:
    """Difference of two logits behind a text, and how large a near-tie may be."""
    import torch

    target = engine.target
    with torch.inference_mode():
        logits_V = target.logits_behind(prompt, text).double()
    first, second = float(logits_V[one]), float(logits_V[other])
    step = torch.finfo(target.dtype).eps * max(abs(first), abs(second))
    return abs(first - second), max(_ROUNDINGS * step, _SLACK)


def _text(engine: "Engine", token_ids: Sequence[int], at: int) -> str | None:
    if at >= len(token_ids):
        return None
    if engine.target.tokenizer is None:
        return str(token_ids[at])
    return str(engine.target.tokenizer.decode([token_ids[at]]))
