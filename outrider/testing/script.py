"""Random numbers under a test's control: those that it chose, and a note of how many are asked for.

The streams of rounds within a round (``Stream.child``) are scripted with it.

Legend: B rows, R numbers of a role, J numbers of all roles.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core import Role, Stream


@dataclass(frozen=True)
class Script(Stream):
    """Random numbers that somebody else chose: ``numbers[role]`` is (B, R)."""

    numbers: dict[Role, Tensor] = field(default_factory=dict)
    inner: dict[int, "Script"] = field(default_factory=dict)

    def uniform(self, role: Role, num: int, first: int = 0) -> Tensor:
        chosen_BR = self.numbers[role]
        if first + num > chosen_BR.shape[1]:
            raise AssertionError(f"number {first + num - 1} of {role.name} was never asked before")
        return chosen_BR[:, first : first + num]

    def child(self, number: int) -> Stream:
        if number not in self.inner:
            raise AssertionError(f"inner round {number} never happened before")
        return self.inner[number]

    def at(self, position_B: Tensor) -> Stream:
        raise NotImplementedError("noise keyed by the token's position is not scripted; use chi2")


@dataclass(frozen=True)
class Recorder(Stream):
    """The ordinary numbers, and a note of how many of each role were asked for."""

    asked: dict[Role, int] = field(default_factory=dict)
    inner: dict[int, "Recorder"] = field(default_factory=dict)

    def uniform(self, role: Role, num: int, first: int = 0) -> Tensor:
        self.asked[role] = max(self.asked.get(role, 0), first + num)
        return super().uniform(role, num, first)

    def child(self, number: int) -> Stream:
        if number not in self.inner:
            stream = super().child(number)
            self.inner[number] = Recorder(stream.key_B, stream.position_B)
        return self.inner[number]

    @property
    def num_asked(self) -> int:
        """How many numbers there are in all, J."""
        return sum(self.asked.values()) + sum(child.num_asked for child in self.inner.values())

    def script(self, u_BJ: Tensor) -> Script:
        """These numbers for those asked for, in the order in which a round decides by them: the
        draft's own, those of the rounds within, the verdict's."""
        draft = self.asked.get(Role.DRAFT, 0)
        verdict = sorted(self.asked.keys() - {Role.DRAFT})
        rounds = sorted(self.inner)
        counts = [self.inner[k].num_asked for k in rounds]
        counts = [draft, *counts, *(self.asked[role] for role in verdict)]
        drawn_BR, *parts = u_BJ.split(counts, 1)
        inner = {k: self.inner[k].script(part) for k, part in zip(rounds, parts, strict=False)}
        numbers = {Role.DRAFT: drawn_BR} | dict(zip(verdict, parts[len(rounds) :], strict=True))
        zero_B = torch.zeros(u_BJ.shape[0], dtype=torch.int64)
        return Script(zero_B, zero_B, numbers, inner)
