"""The best rule at fixed positions: mentored decoding, which sorts each distribution only once.

Legend: K positions, R rows, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from outrider.core import Divergence
from outrider.verifiers import Mentored
from outrider.verifiers.clamp import Clamp, ClampPath, sorted_path


class MentoredEnvelope:
    """An ``analysis.frontier.BestRule``: :class:`Mentored` with its own budget at each position.

    Args:
        p_KV: the target's distributions.
        q_KV: the draft's distributions.
    """

    def __init__(self, p_KV: Tensor, q_KV: Tensor) -> None:
        self._distributions = p_KV, q_KV
        self._paths: dict[tuple[Divergence, bool], ClampPath] = {}

    def __call__(self, divergence: Divergence, budget_K: Tensor, off_support: bool) -> Tensor:
        """1 - ρ, where ρ is the probability of a rejection."""
        # ``exact`` declares a single budget, but a column of budgets broadcasts.
        rho_K1 = self.path(divergence, off_support).exact(budget_K[:, None])  # type: ignore[arg-type]
        return 1 - rho_K1[:, 0]

    def path(self, divergence: Divergence, off_support: bool) -> ClampPath:
        """The distributions between p and q along which the budget is spent; cached."""
        key = divergence, off_support
        if key not in self._paths:
            self._paths[key] = sorted_path(divergence, *self._distributions, off_support)
        return self._paths[key]

    def with_cached_paths(self, rule: Mentored) -> Mentored:
        """The same rule, valid at these positions only, where it need not sort again."""
        values = {each.name: getattr(rule, each.name) for each in fields(rule)}
        return _CachedMentored(**values, envelope=self)


@dataclass(frozen=True)
class _CachedMentored(Mentored):
    """A mentored rule for the positions of an envelope, whose sorted paths it uses."""

    envelope: Any = None

    def solve(self, p_RV: Tensor, q_RV: Tensor | None, x_R: Tensor | None) -> Clamp:
        path = self.envelope.path(self.divergence, self.allow_off_support)
        return path.clamp(path.exact(self.budget))


def chunks(p_KV: Tensor, q_KV: Tensor, numbers: int = 1 << 20) -> Iterator[tuple[Tensor, Tensor]]:
    """The distributions in float64, normalised, in chunks of at most ``numbers`` numbers each.

    A chunk has at least one row.
    """
    device = "cpu" if p_KV.device.type == "mps" else p_KV.device  # which has no float64
    rows = max(1, numbers // p_KV.shape[1])
    for p_rows_KV, q_rows_KV in zip(p_KV.split(rows), q_KV.split(rows), strict=True):
        yield _distribution(p_rows_KV, device), _distribution(q_rows_KV, device)


def _distribution(weights_KV: Tensor, device: torch.device | str) -> Tensor:
    weights_KV = weights_KV.to(device).double()
    return weights_KV / weights_KV.sum(-1, keepdim=True)
