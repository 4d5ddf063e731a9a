"""A cell: one method with its parameters at one setting, and the key of its measurements.

A measurement may stand for a cell only if nothing that it depends on has changed. The key is a hash
over all of that: the code, the machine, the weights of the models, the settings, and the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One point of a plan's grid.

    Attributes:
        method: the text form of the method and its parameters.
        title: its name in tables.
        gamma: the draft length; None is the method's own.
        draft: the name of its draft; None for a method without one.
        temperature: of the sampling.
        data: the name of the data set.
        batch_size: requests that run together.
        lossless: whether the output has exactly the target's distribution.
        is_baseline: whether the speed-ups are relative to this method.
        identity: everything else that the measurements depend on, as JSON; see ``identity.py``.
    """

    method: str
    title: str
    gamma: int | None
    draft: str | None
    temperature: float
    data: str
    batch_size: int
    lossless: bool
    is_baseline: bool
    identity: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """A hash of everything that the measurements depend on, names in tables not included."""
        depends = {
            "method": self.method,
            "gamma": self.gamma,
            "temperature": self.temperature,
            "batch_size": self.batch_size,
            "identity": self.identity,
        }
        return sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def setting(self) -> tuple[float, str, int]:
        """What a cell shares with its baseline: temperature, data set and batch size."""
        return self.temperature, self.data, self.batch_size

    def __str__(self) -> str:
        """One line for progress displays and messages."""
        parts = [self.title]
        if self.gamma is not None and f"γ {self.gamma}" not in self.title:
            parts.append(f"γ {self.gamma}")
        parts += [f"T {self.temperature:g}", self.data, f"batch {self.batch_size}"]
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The cell as JSON, its key included."""
        return {"key": self.key, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cell:
        """The inverse of :meth:`as_dict`."""
        return cls(**{name: value for name, value in values.items() if name != "key"})
