"""One model of an engine: how long its passes take, alone and in rounds, and how long they must.

Alone, passes of one token follow each other; in rounds they have as many tokens as the method gives
them, and what runs in between has pushed weights out of the caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.lab.profile.bandwidth import Bandwidth, read_bandwidth
from outrider.lab.profile.beta import interpolated, pass_times
from outrider.lab.profile.floor import Floor, cache_bytes, decoder_layers, weight_bytes
from outrider.lab.profile.phases import Passes
from outrider.runtime import HFModel
from outrider.runtime.hf.early_exit import EarlyExit


@dataclass(frozen=True)
class ModelPasses:
    """A model's passes.

    Attributes:
        model: whose.
        times: seconds of a pass alone, by its number of tokens.
        passes: those in rounds; None if there were none.
        num_bytes: of weights, and of keys and values, that a pass must read: ``alone``, where it
            has one token, and in a ``round``.
    """

    model: HFModel
    times: dict[int, float]
    passes: Passes | None
    num_bytes: dict[str, tuple[int, int]]

    @classmethod
    def measure(
        cls,
        model: HFModel,
        text: Sequence[int],
        source: Sequence[int] | None,
        passes: Passes | None,
    ) -> "ModelPasses":
        """Times its passes behind a text (and counts what they read)."""
        times, cache = pass_times(model, text, source)
        layers = decoder_layers(model) if source is None else []
        beyond = layers[model.num_layers :]
        lent = layers[: model.k] if isinstance(model, EarlyExit) else []
        num_bytes = {
            "alone": (weight_bytes(model.module, 1, beyond), cache_bytes(model, cache, len(text)))
        }
        if passes is not None:
            width = max(1, round(passes.tokens))
            num_bytes["round"] = (
                weight_bytes(model.module, width, [*beyond, *lent]),
                cache_bytes(model, cache, passes.context),
            )
        return cls(model, times, passes, num_bytes)

    def relative(self, num_tokens: float, to: "ModelPasses") -> float:
        """A pass over so many tokens, in passes over one token of another model."""
        return interpolated(self.times, num_tokens) / to.times[1]

    def as_dict(self, memory: Bandwidth, cache_size: int | None) -> dict[str, Any]:
        """Pass times, β and floors, for JSON."""
        seconds = {"alone": self.times[1]}
        if self.passes is not None:
            seconds["round"] = self.passes.seconds
        floors = {}
        for where, counted in self.num_bytes.items():
            least = self._floor(counted, memory, cache_size)
            reached = least.seconds / seconds[where]
            floors[where] = {**least.as_dict(), "pass": seconds[where], "reached": reached}
        return {
            "architecture": type(self.model.module).__name__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "pass_seconds": {str(n): s for n, s in self.times.items()},
            "beta": {str(n): s / self.times[1] for n, s in self.times.items()},
            "floors": floors,
        }

    def _floor(self, counted: tuple[int, int], memory: Bandwidth, cache_size: int | None) -> Floor:
        """By the memory's bandwidth; by the cache's, measured, for what fits into it."""
        fits = cache_size is not None and sum(counted) <= cache_size
        bandwidth = read_bandwidth(self.model.device, sum(counted)) if fits else memory
        return Floor(*counted, bandwidth.median, fits)
