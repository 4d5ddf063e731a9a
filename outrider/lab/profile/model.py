"""The forward passes of one model: their times alone and in rounds, and their floors.

Alone, passes over one token follow each other directly. In rounds, they are as wide as the method
makes them, and other work in between evicts weights from the processor's caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.lab.analysis.pass_times import interpolated
from outrider.lab.profile.bandwidth import Bandwidth, read_bandwidth
from outrider.lab.profile.beta import pass_times
from outrider.lab.profile.floor import Floor, cache_bytes, decoder_layers, weight_bytes
from outrider.lab.profile.phases import Passes
from outrider.runtime import HFModel
from outrider.runtime.hf.early_exit import EarlyExit


@dataclass(frozen=True)
class ModelPasses:
    """The measured forward passes of a model.

    Attributes:
        model: the model.
        times: seconds of a pass alone, by its number of tokens.
        passes: the passes in rounds; None if there were none.
        num_bytes: bytes of weights, and of keys and values, that a pass must read, for a pass over
            one token ``alone`` and for one in a ``round``.
    """

    model: HFModel
    times: dict[int, float]
    passes: Passes | None
    num_bytes: dict[str, tuple[int, int]]

    @classmethod
    def measure(
        cls,
        model: HFModel,
        tokens: Sequence[int],
        source: Sequence[int] | None,
        passes: Passes | None,
    ) -> "ModelPasses":
        """Times a model's passes after a context, and counts the bytes that they read.

        Args:
            model: the model.
            tokens: the context.
            source: for an encoder-decoder, the encoder's input.
            passes: the model's passes in rounds; None if there were none.
        """
        times, cache = pass_times(model, tokens, source)
        layers = decoder_layers(model) if source is None else []
        beyond = layers[model.num_layers :]
        drafting = layers[: model.k] if isinstance(model, EarlyExit) else []
        num_bytes = {
            "alone": (weight_bytes(model.module, 1, beyond), cache_bytes(model, cache, len(tokens)))
        }
        if passes is not None:
            width = max(1, round(passes.tokens))
            num_bytes["round"] = (
                weight_bytes(model.module, width, [*beyond, *drafting]),
                cache_bytes(model, cache, passes.context),
            )
        return cls(model, times, passes, num_bytes)

    def relative(self, num_tokens: float, to: "ModelPasses") -> float:
        """The time of a pass, in units of another model's pass over one token."""
        return interpolated(self.times, num_tokens) / to.times[1]

    def as_dict(self, memory: Bandwidth, cache_size: int | None) -> dict[str, Any]:
        """Pass times, β and floors as a JSON document."""
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
        """The floor by the memory's bandwidth, or by the cache's for what fits into it."""
        fits = cache_size is not None and sum(counted) <= cache_size
        bandwidth = read_bandwidth(self.model.device, sum(counted)) if fits else memory
        return Floor(*counted, bandwidth.median, fits)
