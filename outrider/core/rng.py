"""Counter-based random numbers: a pure function of (seed, request, position, role).

No generator has a state to advance, so a row's draws depend neither on its batch-mates, nor on
preemption, nor on the batch size. The function is the finaliser of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), applied once per key part.

Within a round, ``position`` is the position of the root: rounds have different roots, so no draw
is ever used twice. (Keying by the drafted token's own position would reuse the draws of a rejected
draft in the next round, which biases rules whose early decisions depend on later draws, such as
block verification.) A rule that wants noise tied to the token's own position asks for it with
:meth:`Stream.at`.

A round asks for a few numbers of several roles. Those of a few rows are made together, when the
first of them is asked for, and on a CPU by numpy, to which a small array is a fifth of the work
that it is to torch.

Legend: B rows, R numbers per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


AHEAD, _FEW = 16, 64  # numbers of each role that are made together, and for how many rows at most
_ROLE_SHIFT = 40

Words = Any
"""A numpy array of int64, whose arithmetic is that of a tensor."""


class Role(IntEnum):
    """What a random number is for; part of its key."""

    DRAFT = 0
    ACCEPT = 1
    NEXT = 2
    NOISE = 3
    INNER = 4


_TOGETHER = (Role.DRAFT, Role.ACCEPT, Role.NEXT)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit integers. Any shape, int64."""
    mixed: Tensor = _mixed(x)
    return mixed


def _mixed(x: Tensor | Words) -> Any:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def fold(key: Tensor, part: Tensor | int) -> Tensor:
    """Key of a sub-stream: absorbs one more integer. Broadcasts."""
    return mix((key ^ mix_int(part)) + _GOLDEN)


def fold_by_numpy(key: Tensor, part: Tensor) -> Tensor:
    """:func:`fold` of two tensors in main memory, in a fraction of the time if they are small."""
    if key.ndim == 0:  # numpy warns where a single number wraps around
        return fold(key, part)
    return torch.from_numpy(_folded(key.numpy(), part.numpy() * _GOLDEN))


def mix_int(part: Tensor | int) -> Tensor | int:
    """Spreads a small integer over 64 bits so that neighbours do not collide when xored."""
    if isinstance(part, Tensor):
        return part * _GOLDEN
    spread = (part * _GOLDEN) & 0xFFFFFFFFFFFFFFFF
    return spread - (1 << 64) if spread >= 1 << 63 else spread


def row_keys(seeds: list[int], requests: list[int], device: torch.device | str) -> Tensor:
    """One key per row from its seed and request number, shape (B,)."""
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
        position_B: the position that the numbers belong to.
        made: gives :attr:`together_BR` where somebody has made it already. A program that is traced
            takes its numbers from there: hashing does not compile to good code.
    """

    key_B: Tensor
    position_B: Tensor
    made: Callable[[], Tensor] | None = field(default=None, kw_only=True)

    def at(self, position_B: Tensor) -> "Stream":
        """The same rows at another position."""
        return Stream(self.key_B, position_B)

    @cached_property
    def _here_B1(self) -> Tensor:
        if self.key_B.device.type == "cpu":
            spread_B = self.position_B.numpy() * _GOLDEN
            return torch.from_numpy(_folded(self.key_B.numpy(), spread_B)[:, None])
        return fold(self.key_B, self.position_B)[:, None]

    @cached_property
    def together_BR(self) -> Tensor:
        """The first ``AHEAD`` numbers of the roles that rounds draw by, one role behind the
        other."""
        return self._uniform(_TOGETHER, AHEAD, 0) if self.made is None else self.made()

    def uniform(self, role: Role, num: int, first: int = 0) -> Tensor:
        """Numbers ``first … first+num-1`` of a role: uniform in [0, 1), shape (B, num)."""
        together = self.made is not None or self.key_B.shape[0] <= _FEW
        if not together or role not in _TOGETHER or first + num > AHEAD:
            return self._uniform((role,), num, first)
        first += AHEAD * _TOGETHER.index(role)
        return self.together_BR[:, first : first + num]

    def _uniform(self, roles: tuple[Role, ...], num: int, first: int) -> Tensor:
        bits_BR = self._counted(roles, num, first)
        if isinstance(bits_BR, Tensor):
            return as_uniform(bits_BR)
        return torch.from_numpy(((bits_BR >> 12) & 0xFFFFFFFFFFFFF) * 2.0**-52)

    def _counted(self, roles: tuple[Role, ...], num: int, first: int) -> Tensor | Words:
        """The bits of numbers ``first … first+num-1`` of each role, on a CPU as numpy's array."""
        _refuse_to_trace()
        spread_R = _spread(roles, num, first, self.key_B.device)
        if isinstance(spread_R, Tensor):
            return _folded(self._here_B1, spread_R)
        return _folded(self._here_B1.numpy(), spread_R)

    def child(self, number: int) -> "Stream":
        """A stream of its own for the ``number``-th round within this one: its numbers are
        independent of this stream's, of its other children's, and of all other rounds'."""
        key_B = torch.as_tensor(self._counted((Role.INNER,), 1, number)[:, 0])
        return Stream(key_B, self.position_B)

    def bits(self, role: Role, number_BR: Tensor) -> Tensor:
        """64 random bits for each of these numbers of a role, shape (B, R)."""
        _refuse_to_trace()
        return fold(self._here_B1, number_BR + (int(role) << _ROLE_SHIFT))


class UpcomingUniforms:
    """The numbers of the positions ahead of a few rows: on a CPU those of many positions take
    little longer to make than those of one.

    Args:
        key_B: keys of the rows.
        lengths: the first position of each.
    """

    def __init__(self, key_B: Tensor, lengths: Sequence[int]) -> None:
        self._first = list(lengths)
        self.num_positions = _FEW // len(lengths)
        place_P = torch.arange(self.num_positions)
        position_BP = torch.tensor(self._first)[:, None] + place_P
        key_BP = key_B[:, None].expand_as(position_BP)
        numbers = Stream(key_BP.flatten(), position_BP.flatten()).together_BR
        self._numbers_BPR = numbers.view(*position_BP.shape, -1)

    def reaches(self, lengths: Sequence[int]) -> bool:
        """Whether the numbers at these positions are among them."""
        pairs = zip(self._first, lengths, strict=True)
        return all(0 <= length - first < self.num_positions for first, length in pairs)

    def at(self, lengths: Sequence[int]) -> Tensor:
        """``Stream.together_BR`` at these positions."""
        places = [length - first for first, length in zip(self._first, lengths, strict=True)]
        if len(places) == 1:
            return self._numbers_BPR[:, places[0]]
        return self._numbers_BPR[range(len(places)), places]

    @staticmethod
    def pays(key_B: Tensor) -> bool:
        """Whether it is worth the while."""
        return key_B.device.type == "cpu" and key_B.shape[0] <= _FEW // 16


def _refuse_to_trace() -> None:
    """Raises NotImplementedError in a program that is traced: the compiler would write out the
    hash of every number as one expression, over and over."""
    if torch.compiler.is_compiling():
        raise NotImplementedError("random numbers are made outside of programs")


def _folded(key: Tensor | Words, spread: Tensor | Words) -> Any:
    """:func:`fold` of a part that is spread already."""
    return _mixed((key ^ spread) + _GOLDEN)


@lru_cache(maxsize=16)
def _spread(roles: tuple[Role, ...], num: int, first: int, device: torch.device) -> Tensor | Words:
    """The part of the key that says which number of which role, for some of each role; where
    numpy works on them, as its array."""
    role_R1 = torch.tensor(roles)[:, None] << _ROLE_SHIFT
    spread_R = (role_R1 + torch.arange(first, first + num)).flatten() * _GOLDEN
    return spread_R.numpy() if device.type == "cpu" else spread_R.to(device)


def as_uniform(bits: Tensor) -> Tensor:
    """Random bits as numbers in [0, 1): their upper 52 in float64.

    Only 23 in float32, where the device has no float64. Either way ``u * total < total`` holds
    after rounding, and the lower 12 bits are left for other use.
    """
    if bits.device.type == "mps":
        return ((bits >> 41) & 0x7FFFFF).float() * 2.0**-23
    return ((bits >> 12) & 0xFFFFFFFFFFFFF).double() * 2.0**-52
