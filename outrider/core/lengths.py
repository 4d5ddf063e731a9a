"""How many tokens each row of a batch has, known on the host and on the device at the same time.

The host needs lengths to size buffers and to choose a code path, the device to write keys, values
and tokens. One value carries both, so that neither side can be out of date.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to the device asynchronously.

    A copy from pageable memory waits until the GPU has finished all queued work; a copy from pinned
    memory is queued behind that work instead.
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True, eq=False, slots=True)
class Lengths:
    """A number of tokens per row; immutable.

    Attributes:
        host: the numbers as a list, which nobody may modify.
        device_B: the same numbers as an int64 tensor.
    """

    host: list[int]
    device_B: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Lengths:
        """From numbers on the host. Copies them to the device without waiting for it."""
        host = list(lengths)
        return cls(host, to_device(torch.tensor(host, dtype=torch.int64), torch.device(device)))

    @classmethod
    def read(cls, length_B: Tensor) -> Lengths:
        """From numbers on the device. Waits for the device."""
        return cls(length_B.tolist(), length_B)

    def __add__(self, other: Lengths | int) -> Lengths:
        if isinstance(other, int):
            return Lengths([n + other for n in self.host], self.device_B + other)
        host = [n + m for n, m in zip(self.host, other.host, strict=True)]
        return Lengths(host, self.device_B + other.device_B)

    def __sub__(self, other: Lengths | int) -> Lengths:
        if isinstance(other, int):
            return Lengths([n - other for n in self.host], self.device_B - other)
        host = [n - m for n, m in zip(self.host, other.host, strict=True)]
        return Lengths(host, self.device_B - other.device_B)

    def at_most(self, bound: Lengths) -> Lengths:
        """The smaller number of each row. Makes a tensor only where neither side is the smaller in
        every row."""
        pairs = list(zip(self.host, bound.host, strict=True))
        if all(n <= m for n, m in pairs):
            return self
        if all(m <= n for n, m in pairs):
            return bound
        return Lengths([min(pair) for pair in pairs], self.device_B.minimum(bound.device_B))

    def keep(self, rows: Sequence[int]) -> Lengths:
        """Those of these rows, in this order."""
        index_B = torch.tensor(rows, dtype=torch.int64, device=self.device_B.device)
        return Lengths([self.host[row] for row in rows], self.device_B[index_B])

    def join(self, other: Lengths) -> Lengths:
        """Those of these rows, then those of another batch's."""
        return Lengths(self.host + other.host, torch.cat([self.device_B, other.device_B]))


class Sequences:
    """Base class of what holds the sequences of a batch: it gives everybody else their lengths to
    read. Only the verbs of a subclass assign ``sequence_lengths``, each on its own object.

    Attributes:
        sequence_lengths: tokens per row.
        cuts_back: whether rolling back costs nothing, so that a prefill may read tokens beyond a
            row's end and forget them.
    """

    sequence_lengths: Lengths
    cuts_back = False

    @property
    def lengths(self) -> list[int]:
        """Tokens per row, on the host."""
        return self.sequence_lengths.host

    @property
    def length_B(self) -> Tensor:
        """Tokens per row, on the device."""
        return self.sequence_lengths.device_B

    @property
    def num_rows(self) -> int:
        return len(self.sequence_lengths.host)
