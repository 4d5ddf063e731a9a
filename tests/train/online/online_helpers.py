"""A tiny pair whose draft is a disturbed copy of the target, so that training makes it better."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from tiny_models import tiny
from torch import Tensor

from outrider import Sampling
from outrider.core import Round
from outrider.engine.request import Row
from outrider.engine.round_observer import RowRound
from outrider.runtime import HFModel
from outrider.train.online import AdaptSettings

QUICK = AdaptSettings(
    where="idle", learning_rate=3e-3, publish_every=2, trial_rounds=0, span=16, niceness=0
)


def sampled(num: int = 48, seed: int = 0) -> Sampling:
    return Sampling(temperature=1, max_new_tokens=num, ignore_eos=True, seed=seed)


def disturbed(model: HFModel, size: float = 0.15, seed: int = 3, name: str = "draft") -> HFModel:
    """A copy with noise on its weights."""
    twin = model.with_own_weights()
    twin.name = name
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return twin


def pair(**settings: object) -> tuple[HFModel, HFModel]:
    """A target, and a draft of which about a quarter is accepted."""
    target = tiny(name="target", **settings)  # type: ignore[arg-type]
    return target, disturbed(target)


@dataclass
class Watching:
    """An observer that notes what it sees, and takes no numbers from the rounds."""

    rounds: list[Round] = field(default_factory=list)
    done: list[RowRound] = field(default_factory=list)
    blocks: Sequence[Tensor] = ()

    @contextmanager
    def round(self) -> Iterator[None]:
        self.before_round()
        yield

    def before_round(self) -> None:
        """Nothing to do."""

    def observe(self, round_: Round, rows: Sequence[Row]) -> "Watching":
        self.rounds.append(round_)
        return self

    def read(self, done: RowRound, line: Sequence[list[float]]) -> None:
        self.done.append(done)
