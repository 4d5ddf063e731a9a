"""Counter-based random numbers: a pure function of (seed, request, position, role).

No generator has a state to advance, so a row's draws depend neither on the other rows of its batch,
nor on preemption, nor on the batch size. The function is the finaliser of SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), applied once per part of
the key.

Within a round, ``position`` is the position of the root. Rounds have different roots, so no draw is
ever used twice. (Keying by the drafted token's own position would reuse the draws of a rejected
draft in the next round, which biases rules whose early decisions depend on later draws, such as
block verification.) A rule that needs noise keyed by the token's own position gets it with
:meth:`Stream.at`.

A round needs a few numbers of several roles. In small batches the numbers of all these roles are
generated together on the first request. On a CPU this is done with numpy, whose overhead on small
arrays is a fifth of torch's.

Legend: B rows, M positions, J random numbers per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from outrider.core.lengths import to_device
from outrider.core.recording import CAPTURE

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB

NUM_PER_ROLE = 16
"""Numbers of each role that are generated together."""

_MAX_ROWS = 64  # larger batches generate the numbers of each role on request
_ROLE_SHIFT = 40
_MOST_BY_NUMPY = 1 << 15  # larger tensors take longer by numpy, which has one thread
_MOST_FROM_HOST = 1 << 12  # more numbers take a GPU less time than the host

NumpyInts = Any
"""A numpy array of int64. It supports the same arithmetic operators as a tensor."""


class Role(IntEnum):
    """What a random number is used for; part of its key."""

    DRAFT = 0
    ACCEPT = 1
    NEXT = 2
    NOISE = 3
    INNER = 4


_ROUND_ROLES = (Role.DRAFT, Role.ACCEPT, Role.NEXT)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection on 64-bit integers. Any shape, int64."""
    mixed: Tensor = _mixed(x)
    return mixed


def _mixed(x: Tensor | NumpyInts) -> Any:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def fold(key: Tensor, part: Tensor | int) -> Tensor:
    """The key of a sub-stream: absorbs one more integer. Broadcasts."""
    return mix((key ^ mix_int(part)) + _GOLDEN)


def fold_by_numpy(key: Tensor, part: Tensor) -> Tensor:
    """:func:`fold` of two CPU tensors by numpy, which is faster for small tensors."""
    if key.ndim == 0:  # numpy warns when a scalar overflows
        return fold(key, part)
    return torch.from_numpy(_folded(key.numpy(), part.numpy() * _GOLDEN))


def mix_int(part: Tensor | int) -> Tensor | int:
    """Spreads a small integer over 64 bits, so that neighbours do not collide under XOR."""
    if isinstance(part, Tensor):
        return part * _GOLDEN
    spread = (part * _GOLDEN) & 0xFFFFFFFFFFFFFFFF
    return spread - (1 << 64) if spread >= 1 << 63 else spread


def row_keys(seeds: list[int], requests: list[int], device: torch.device | str) -> Tensor:
    """The key of each row, from its seed and request number, shape (B,)."""
    seed_B = torch.tensor([_signed(s) for s in seeds], dtype=torch.int64)
    request_B = torch.tensor([_signed(r) for r in requests], dtype=torch.int64)
    return fold(mix(seed_B + _GOLDEN), request_B).to(device)


def _signed(x: int) -> int:
    x &= 0xFFFFFFFFFFFFFFFF
    return x - (1 << 64) if x >= 1 << 63 else x


@dataclass(frozen=True)
class Stream:
    """The random numbers of a batch, at one position per row.

    Attributes:
        key_B: keys of the rows, from :func:`row_keys`.
        position_B: the position of each row that keys its numbers.
        precomputed: returns the numbers of :attr:`uniforms_BJ` from a first one up to a last one,
            if the caller has generated them already.
        on_host: returns the same stream on the CPU, which then generates all other uniform numbers:
            a GPU gets them in one copy, which takes less time than launching a dozen kernels.
    """

    key_B: Tensor
    position_B: Tensor
    precomputed: Callable[[int, int], Tensor] | None = field(default=None, kw_only=True)
    on_host: "Callable[[], Stream] | None" = field(default=None, kw_only=True)

    def at(self, position_B: Tensor) -> "Stream":
        """The same rows at another position."""
        return Stream(self.key_B, position_B)

    @cached_property
    def _here_B1(self) -> Tensor:
        if self.key_B.device.type == "cpu" and not _is_recorded():
            spread_B = self.position_B.numpy() * _GOLDEN
            return torch.from_numpy(_folded(self.key_B.numpy(), spread_B)[:, None])
        return fold(self.key_B, self.position_B)[:, None]

    @cached_property
    def uniforms_BJ(self) -> Tensor:
        """The first ``NUM_PER_ROLE`` uniform numbers of each role that every round uses, role by
        role, shape (B, J)."""
        if self.precomputed is not None:
            return self.precomputed(0, NUM_PER_ROLE * len(_ROUND_ROLES))
        return self._uniform(_ROUND_ROLES, NUM_PER_ROLE, 0)

    def uniform(self, role: Role, num: int, first: int = 0) -> Tensor:
        """Numbers ``first … first+num-1`` of a role, uniform in [0, 1), shape (B, num)."""
        together = self.precomputed is not None or self.key_B.shape[0] <= _MAX_ROWS
        if not together or role not in _ROUND_ROLES or first + num > NUM_PER_ROLE:
            return self._uniform((role,), num, first)
        first += NUM_PER_ROLE * _ROUND_ROLES.index(role)
        if self.precomputed is not None:
            return self.precomputed(first, first + num)
        return self.uniforms_BJ[:, first : first + num]

    def _uniform(self, roles: tuple[Role, ...], num: int, first: int) -> Tensor:
        if self.on_host is not None and len(self.key_B) * num <= _MOST_FROM_HOST:
            return to_device(self.on_host()._uniform(roles, num, first), self.key_B.device)
        bits_BJ = self._bits(roles, num, first)
        if isinstance(bits_BJ, Tensor):
            return as_uniform(bits_BJ)
        return torch.from_numpy(((bits_BJ >> 12) & 0xFFFFFFFFFFFFF) * 2.0**-52)

    def _bits(self, roles: tuple[Role, ...], num: int, first: int) -> Tensor | NumpyInts:
        """The bits of numbers ``first … first+num-1`` of each role; on a CPU as a numpy array."""
        _require_not_recording()
        spread_J = _spread(roles, num, first, self.key_B.device)
        if isinstance(spread_J, Tensor):
            return _folded(self._here_B1, spread_J)
        return _folded(self._here_B1.numpy(), spread_J)

    def child(self, number: int) -> "Stream":
        """The stream of the ``number``-th round nested within this round.

        Its numbers are independent of those of this stream, its other children and all other
        rounds.
        """
        key_B = torch.as_tensor(self._bits((Role.INNER,), 1, number)[:, 0])
        return Stream(key_B, self.position_B)

    def bits(self, role: Role, number_BJ: Tensor) -> Tensor:
        """64 random bits for each of the given counters of a role, shape (B, J).

        Recorded operators compute the hash themselves: which counters are needed is known only when
        they run.
        """
        part_BJ = number_BJ + (int(role) << _ROLE_SHIFT)
        if _is_recorded():
            return fold(self._here_B1, part_BJ)
        is_small = part_BJ.device.type == "cpu" and part_BJ.numel() <= _MOST_BY_NUMPY
        return (fold_by_numpy if is_small else fold)(self._here_B1, part_BJ)


class UpcomingUniforms:
    """Random numbers generated in advance for the next positions of a small batch.

    On a CPU, the numbers of many positions take little longer to generate than those of one. A GPU
    gets those of a round in one copy, which takes less time than launching the kernels that would
    generate them.

    Args:
        key_B: keys of the rows, on the CPU.
        lengths: the first position of each row.
        device: of the numbers.
    """

    def __init__(
        self, key_B: Tensor, lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        self._first = list(lengths)
        self._device = torch.device(device)
        self._last: tuple[list[int], Tensor] | None = None
        self.num_positions = _MAX_ROWS // len(lengths)
        position_BM = torch.tensor(self._first)[:, None] + torch.arange(self.num_positions)
        key_BM = key_B[:, None].expand_as(position_BM)
        numbers = Stream(key_BM.flatten(), position_BM.flatten()).uniforms_BJ
        self._numbers_BMJ = numbers.view(*position_BM.shape, -1)
        self._by_position: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def covers(self, lengths: Sequence[int]) -> bool:
        """Whether the numbers at these positions have been generated."""
        pairs = zip(self._first, lengths, strict=True)
        return all(0 <= length - first < self.num_positions for first, length in pairs)

    def at(self, lengths: Sequence[int], start: int, stop: int) -> Tensor:
        """Numbers ``start`` to ``stop`` of ``Stream.uniforms_BJ`` at these positions."""
        if self._device.type == "cpu":
            return self._at(lengths, start, stop)
        if self._last is None or self._last[0] != lengths:
            here_BJ = self._at(lengths, 0, self._numbers_BMJ.shape[-1])
            self._last = list(lengths), to_device(here_BJ, self._device)
        return self._last[1][:, start:stop]

    def _at(self, lengths: Sequence[int], start: int, stop: int) -> Tensor:
        """The same on the CPU. Rounds ask for the same numbers again and again, so that where all
        rows have moved equally far, the numbers of all positions are taken apart at once."""
        offsets = [length - first for first, length in zip(self._first, lengths, strict=True)]
        if offsets.count(offsets[0]) < len(offsets):
            return self._numbers_BMJ[range(len(offsets)), offsets, start:stop]
        found = self._by_position.get((start, stop))
        if found is None:
            found = self._numbers_BMJ[..., start:stop].unbind(1)
            self._by_position[start, stop] = found
        return found[offsets[0]]

    @staticmethod
    def is_faster(key_B: Tensor) -> bool:
        """Whether generating numbers in advance is faster for a batch of this size and device."""
        most = {"cpu": _MAX_ROWS // 16, "cuda": _MAX_ROWS}.get(key_B.device.type, 0)
        return key_B.shape[0] <= most


def _is_recorded() -> bool:
    """``recording.is_recorded``, so that a request runs through one file less."""
    return CAPTURE.kept is not None or torch.compiler.is_compiling()


def _require_not_recording() -> None:
    """Raises NotImplementedError while operators are recorded: the compiler would inline the hash
    of every uniform number, again and again."""
    if _is_recorded():
        raise NotImplementedError("random numbers cannot be generated inside a recorded program")


def _folded(key: Tensor | NumpyInts, spread: Tensor | NumpyInts) -> Any:
    """:func:`fold` of a part that :func:`mix_int` has already spread."""
    return _mixed((key ^ spread) + _GOLDEN)


@lru_cache(maxsize=16)
def _spread(
    roles: tuple[Role, ...], num: int, first: int, device: torch.device
) -> Tensor | NumpyInts:
    """The spread key parts of numbers ``first … first+num-1`` of each role, (J,): an array where
    numpy does the arithmetic, else a tensor."""
    shifted_role = torch.tensor(roles)[:, None] << _ROLE_SHIFT
    spread_J = (shifted_role + torch.arange(first, first + num)).flatten() * _GOLDEN
    return spread_J.numpy() if device.type == "cpu" else spread_J.to(device)


def as_uniform(bits: Tensor) -> Tensor:
    """Random bits as uniform numbers in [0, 1), from the upper 52 bits, in float64.

    On devices without float64 they come from the upper 23 bits, in float32. In both cases
    ``u * total < total`` holds after rounding, and the lower 12 bits stay free for other uses.
    """
    if bits.device.type == "mps":
        return ((bits >> 41) & 0x7FFFFF).float() * 2.0**-23
    return ((bits >> 12) & 0xFFFFFFFFFFFFF).double() * 2.0**-52
