"""How many tokens each row of a batch has, known on the host and on the device at the same time.

The host needs lengths to size buffers and to choose a code path, the device to write keys, values
and tokens. One value carries both, so that neither side can be out of date.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class Lengths:
    """A number of tokens per row; immutable.

    A round makes a dozen of them, of which few are read on the device. On a CPU the tensor is
    therefore made when it is first asked for; on other devices, where a copy from the host would
    cost more, it is computed from the tensors of the others.

    Args:
        host: the numbers as a list, which nobody may modify.
        device_B: the same numbers as an int64 tensor; None makes it on the CPU, on request.
    """

    __slots__ = ("_device_B", "host")

    def __init__(self, host: list[int], device_B: Tensor | None = None) -> None:
        self.host = host
        self._device_B = device_B

    @property
    def device_B(self) -> Tensor:
        """The numbers as an int64 tensor, which nobody may modify."""
        if self._device_B is None:
            if len(self.host) == 1:  # a third of the time of ``torch.tensor``
                self._device_B = torch.full((1,), self.host[0], dtype=torch.int64)
            else:
                self._device_B = torch.tensor(self.host, dtype=torch.int64)
        return self._device_B

    @property
    def _on_cpu(self) -> bool:
        return self._device_B is None or self._device_B.is_cpu

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Lengths:
        """From numbers on the host. Copies them to the device without waiting for it."""
        host, device = list(lengths), torch.device(device)
        if device.type == "cpu":
            return cls(host)
        return cls(host, to_device(torch.tensor(host, dtype=torch.int64), device))

    @classmethod
    def read(cls, length_B: Tensor) -> Lengths:
        """From numbers on the device. Waits for the device."""
        return cls(length_B.tolist(), length_B)

    def __add__(self, other: Lengths | int) -> Lengths:
        if isinstance(other, int):
            host = [n + other for n in self.host]
            return Lengths(host, None if self._on_cpu else self.device_B + other)
        host = [n + m for n, m in zip(self.host, other.host, strict=True)]
        return Lengths(host, None if self._on_cpu else self.device_B + other.device_B)

    def __sub__(self, other: Lengths | int) -> Lengths:
        if isinstance(other, int):
            host = [n - other for n in self.host]
            return Lengths(host, None if self._on_cpu else self.device_B - other)
        host = [n - m for n, m in zip(self.host, other.host, strict=True)]
        return Lengths(host, None if self._on_cpu else self.device_B - other.device_B)

    def at_most(self, bound: Lengths) -> Lengths:
        """The smaller number of each row. Makes a tensor only where neither side is the smaller in
        every row."""
        smaller = list(map(min, self.host, bound.host))
        if smaller == self.host:
            return self
        if smaller == bound.host:
            return bound
        return Lengths(smaller, None if self._on_cpu else self.device_B.minimum(bound.device_B))

    def keep(self, rows: Sequence[int]) -> Lengths:
        """Those of these rows, in this order."""
        host = [self.host[row] for row in rows]
        if self._on_cpu:
            return Lengths(host)
        index_B = torch.tensor(rows, dtype=torch.int64, device=self.device_B.device)
        return Lengths(host, self.device_B[index_B])

    def join(self, other: Lengths) -> Lengths:
        """Those of these rows, then those of another batch's."""
        host = self.host + other.host
        if self._on_cpu:
            return Lengths(host)
        return Lengths(host, torch.cat([self.device_B, other.device_B]))


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
