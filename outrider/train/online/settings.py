"""How an engine's draft model is adapted; checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from outrider.core.errors import InvalidParameterError
from outrider.core.values import as_python, check_choice, is_finite, is_whole, shown
from outrider.train.losses import DIVERGENCES

Where = Literal["process", "idle"]


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`outrider.train.online.adapt`, which explains them."""

    divergence: str = "forward-kl"
    learning_rate: float = 1e-4
    batch_size: int = 8
    replay: float = 0.5
    replay_samples: int = 512
    publish_every: int = 8
    where: Where = "process"
    threads: int = 1
    niceness: int = 10
    top_k: int = 64
    max_tokens_per_second: float = 1000.0
    span: int = 64
    context: int = 256
    buffer_samples: int = 256
    trial_rounds: int = 400
    false_alarm: float = 0.01

    def __post_init__(self) -> None:
        check_choice("divergence", self.divergence, DIVERGENCES)
        check_choice("where", self.where, get_args(Where))
        for name, least, most in (
            ("batch_size", 1, 4096),
            ("replay_samples", 0, 2**20),
            ("publish_every", 1, 2**20),
            ("threads", 1, 4096),
            ("niceness", 0, 19),
            ("top_k", 1, 4096),
            ("span", 1, 4096),
            ("context", 1, 2**20),
            ("buffer_samples", 1, 2**20),
            ("trial_rounds", 0, 2**30),
        ):
            value = as_python(getattr(self, name))
            if not is_whole(value) or not least <= value <= most:
                raise InvalidParameterError(
                    f"{name}={shown(value)}: must be a whole number from {least} to {most}"
                )
        self._check_share("replay", self.replay, 0 <= _number(self.replay) < 1, "[0, 1)")
        inside = 0 < _number(self.false_alarm) < 1
        self._check_share("false_alarm", self.false_alarm, inside, "(0, 1)")
        for name in ("learning_rate", "max_tokens_per_second"):
            value = as_python(getattr(self, name))
            if not is_finite(value) or value <= 0:
                raise InvalidParameterError(f"{name}={shown(value)}: must be a number above 0")

    def _check_share(self, name: str, value: object, is_inside: bool, interval: str) -> None:
        if not is_inside:
            raise InvalidParameterError(f"{name}={shown(value)}: must be a number in {interval}")

    @property
    def new_per_step(self) -> int:
        """Samples of a batch that no step has used before; the others are replayed."""
        return max(1, round(self.batch_size * (1 - self.replay)))


def _number(value: object) -> float:
    """The value as a number; NaN, which lies in no interval, if it is none."""
    number = as_python(value)
    return float(number) if is_finite(number) else float("nan")
