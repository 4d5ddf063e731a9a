"""Streams of random numbers under a test's control: one replays chosen numbers, one records how
many are requested.

Both include the streams of nested rounds (``Stream.child``).

Legend: B rows, J random numbers.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core import Role, Stream


@dataclass(frozen=True)
class ScriptedStream(Stream):
    """A stream of chosen numbers: ``numbers[role]`` has shape (B, J)."""

    numbers: dict[Role, Tensor] = field(default_factory=dict)
    inner: dict[int, "ScriptedStream"] = field(default_factory=dict)

    def uniform(self, role: Role, num: int, first: int = 0) -> Tensor:
        chosen_BJ = self.numbers[role]
        if first + num > chosen_BJ.shape[1]:
            raise AssertionError(
                f"number {first + num - 1} of {role.name} was not requested when recording"
            )
        return chosen_BJ[:, first : first + num]

    def child(self, number: int) -> Stream:
        if number not in self.inner:
            raise AssertionError(f"nested round {number} did not happen when recording")
        return self.inner[number]

    def at(self, position_B: Tensor) -> Stream:
        raise NotImplementedError(
            "noise keyed by the token's position cannot be scripted; use chi2"
        )


@dataclass(frozen=True)
class RecordingStream(Stream):
    """An ordinary stream that records how many numbers of each role were requested."""

    requested: dict[Role, int] = field(default_factory=dict)
    inner: dict[int, "RecordingStream"] = field(default_factory=dict)

    def uniform(self, role: Role, num: int, first: int = 0) -> Tensor:
        self.requested[role] = max(self.requested.get(role, 0), first + num)
        return super().uniform(role, num, first)

    def child(self, number: int) -> Stream:
        if number not in self.inner:
            stream = super().child(number)
            self.inner[number] = RecordingStream(stream.key_B, stream.position_B)
        return self.inner[number]

    @property
    def num_requested(self) -> int:
        """The number of all requested numbers, J."""
        nested = sum(child.num_requested for child in self.inner.values())
        return sum(self.requested.values()) + nested

    def script(self, u_BJ: Tensor) -> ScriptedStream:
        """A stream that replays ``u_BJ``, in the order in which a round uses its numbers: those of
        the draft, of nested rounds, and of the verdict."""
        draft = self.requested.get(Role.DRAFT, 0)
        verdict = sorted(self.requested.keys() - {Role.DRAFT})
        rounds = sorted(self.inner)
        counts = [self.inner[k].num_requested for k in rounds]
        counts = [draft, *counts, *(self.requested[role] for role in verdict)]
        draft_BJ, *parts = u_BJ.split(counts, 1)
        inner = {k: self.inner[k].script(part) for k, part in zip(rounds, parts, strict=False)}
        numbers = {Role.DRAFT: draft_BJ} | dict(zip(verdict, parts[len(rounds) :], strict=True))
        zero_B = torch.zeros(u_BJ.shape[0], dtype=torch.int64)
        return ScriptedStream(zero_B, zero_B, numbers, inner)
