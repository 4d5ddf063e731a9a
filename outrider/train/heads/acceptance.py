"""How much of a head's drafts is accepted: measured by running the engine on held-out prompts.

``acceptance length`` is emitted tokens per forward pass of the target; ``α at i`` the share of
drafts whose i-th token is accepted once the tokens before it are, an estimate of Σ min(p, q) there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.drafters.heads.head import Head
from outrider.engine import Engine
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.sampling import Sampling


@dataclass(frozen=True)
class Probe:
    """What is generated to measure acceptance.

    Attributes:
        prompts: token ids of held-out prompts.
        temperatures: each prompt is continued at each.
        num_tokens: tokens of each continuation.
        num_speculative_tokens: γ.
    """

    prompts: Sequence[Sequence[int]]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_tokens: int = 64
    num_speculative_tokens: int = 5


@dataclass(frozen=True)
class Acceptance:
    """What was measured at one temperature.

    Attributes:
        length: emitted tokens per forward pass of the target.
        alpha: Leviathan's α over all drafted positions.
        by_position: share accepted at each depth of the draft.
    """

    length: float
    alpha: float
    by_position: tuple[float, ...]


def measure(
    head: Head, target: HFModel, method: str, probe: Probe, max_batch_size: int = 8
) -> dict[float, Acceptance]:
    """The acceptance of a head by temperature. The same numbers each time: seeds are fixed."""
    engine = Engine(
        target,
        head,
        METHODS[method],
        num_speculative_tokens=probe.num_speculative_tokens,
        max_batch_size=max_batch_size,
    )
    found = {}
    for temperature in probe.temperatures:
        sampling = Sampling(temperature=temperature, max_new_tokens=probe.num_tokens, seed=0)
        stats = engine.generate([list(prompt) for prompt in probe.prompts], sampling).stats
        positions = tuple(stats.acceptance_by_position[: probe.num_speculative_tokens])
        found[temperature] = Acceptance(stats.acceptance_length, stats.alpha, positions)
    return found


def curves(found: Mapping[float, Acceptance]) -> dict[str, float]:
    """The measurements by name, for reports."""
    values = {}
    for temperature, acceptance in found.items():
        at = f"at T={temperature:g}"
        values[f"acceptance length {at}"] = acceptance.length
        values[f"α {at}"] = acceptance.alpha
        for i, share in enumerate(acceptance.by_position, 1):
            values[f"α at {i} {at}"] = share
    return values


def score(found: Mapping[float, Acceptance]) -> float:
    """The mean acceptance length, by which the best checkpoint is chosen."""
    return sum(acceptance.length for acceptance in found.values()) / len(found)
