"""The option that chooses the target's layers that a head reads."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import InvalidParameterError
from outrider.runtime import HFModel


@dataclass(frozen=True)
class Layers:
    """Layers of the target, numbered as in ``ForwardBatch.hidden_layers``; empty stands for the
    kind's own choice."""

    numbers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, value: object) -> Layers:
        """Reads ``auto`` or numbers such as ``2,15,27``.

        Raises:
            InvalidParameterError: anything else.
        """
        if value == "auto":
            return cls()
        words = str(value).split(",")
        if not all(word.strip().isdecimal() for word in words):
            raise InvalidParameterError("must be 'auto' or layers such as '2,15,27'")
        return cls(tuple(int(word) for word in words))

    def of(self, target: HFModel, default: tuple[int, ...]) -> tuple[int, ...]:
        """The layers to read of a target.

        Raises:
            InvalidParameterError: layers that it does not have.
        """
        chosen = self.numbers or default
        if any(not 1 <= layer <= target.num_layers for layer in chosen):
            raise InvalidParameterError(
                f"layers={self}: {target.name} has layers 1 to {target.num_layers}"
            )
        return chosen

    def __str__(self) -> str:
        return ",".join(map(str, self.numbers)) or "auto"
