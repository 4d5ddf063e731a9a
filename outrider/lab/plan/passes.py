"""Times of forward passes of a sharded model: from a roofline, or measured.

A pass over b rows of n tokens each reads the weights once and the KV cache of every row, and
computes with every token. On g GPUs with tensor parallelism each reads and computes a share, and
the hidden states are summed over the GPUs twice per layer:

    time = max(bytes / (g B), operations / (g F)) + 2 L a(g, s) + L o

B and F are the bandwidth and the operations per second that are reached (Williams, Waterman and
Patterson, "Roofline: An Insightful Visual Performance Model", CACM 2009), L the layers, and o the
time per layer of launching kernels. a is the time to sum s bytes over g GPUs by recursive halving
and doubling, with latency l and bandwidth W of the links (Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 2005):

    a(g, s) = 2 log2(g) l + 2 (g - 1) / g s / W
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.pass_times import interpolated
from outrider.lab.plan.hardware import Accelerator
from outrider.lab.plan.model_size import ModelSize

BANDWIDTH_REACHED, FLOPS_REACHED = 0.8, 0.6
"""Shares of the hardware's bandwidth and operations per second that passes reach: assumed."""
LAYER_SECONDS = 5e-6
"""Time per layer beyond the roofline, for launching kernels from a captured graph: assumed."""


class Passes(Protocol):
    """Times of a model's forward passes."""

    def seconds(self, rows: int, width: int, context: float) -> float:
        """Seconds of a pass over ``width`` tokens of each of ``rows`` rows.

        Args:
            rows: sequences in the batch.
            width: query tokens of each.
            context: mean number of positions that each token attends to.
        """


@dataclass(frozen=True)
class RooflinePasses:
    """Passes by the formula above.

    Attributes:
        model: its weights and KV cache.
        on: each GPU.
        degree: GPUs that share the model.
        bandwidth_reached, flops_reached: shares of the hardware's own numbers.
        layer_seconds: o.
    """

    model: ModelSize
    on: Accelerator
    degree: int = 1
    bandwidth_reached: float = BANDWIDTH_REACHED
    flops_reached: float = FLOPS_REACHED
    layer_seconds: float = LAYER_SECONDS

    def seconds(self, rows: int, width: int, context: float) -> float:
        """Seconds of a pass; see :class:`Passes`."""
        tokens = rows * width
        read = self.model.read_bytes(tokens) / self.degree
        read += rows * self.model.cache_bytes(context, self.degree)
        operations = self.model.operations(tokens, context) / self.degree
        compute = max(
            read / (self.on.bandwidth * self.bandwidth_reached),
            operations / (self.on.flops * self.flops_reached),
        )
        sums = 2 * self.model.layers * self.sum_seconds(tokens * self.model.width * 2)
        return compute + sums + self.model.layers * self.layer_seconds

    def sum_seconds(self, num_bytes: float) -> float:
        """a(g, s): the time to sum ``num_bytes`` over the GPUs; 0 for one GPU."""
        g = self.degree
        if g == 1:
            return 0.0
        moved = 2 * (g - 1) / g * num_bytes / self.on.link_bandwidth
        return 2 * math.log2(g) * self.on.link_latency + moved


@dataclass(frozen=True)
class MeasuredPasses:
    """Passes that were timed, by their number of tokens in all rows together.

    Attributes:
        times: seconds by number of tokens; interpolated linearly, and extrapolated from the nearest
            two, but to no less than the shortest time.

    Raises:
        InvalidParameterError: no times, or one that is not above 0.
    """

    times: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.times or min(self.times.values()) <= 0 or min(self.times) < 1:
            raise InvalidParameterError("measured passes need times above 0, by number of tokens")

    def seconds(self, rows: int, width: int, context: float) -> float:
        """Seconds of a pass; see :class:`Passes`. The context is that of the measurement."""
        return max(interpolated(self.times, rows * width), min(self.times.values()))
