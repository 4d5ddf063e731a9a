"""Where the rows of a step come from: fixed samples, the draft's own samples, or a mixture.

The data of DistillSpec (Zhou et al. 2024, https://arxiv.org/abs/2310.08461): ground truth and
target samples are fixed; draft samples are *on-policy*, drawn from the draft as it is now and
scored by the target.  A replay buffer (Liu et al. 2024, Online Speculative Decoding,
https://arxiv.org/abs/2310.07177) keeps earlier draft samples, which makes each cheaper.

No gradient flows through the sampling.  Rows depend on (seed, step), on the draft's weights, and on
the buffer, which belongs to the checkpoint; so a resumed run sees the rows of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from outrider.core.errors import InvalidParameterError
from outrider.engine import Engine
from outrider.train.data import permutation
from outrider.train.distill.answers import Answering, sampled
from outrider.train.distill.cells import Cells
from outrider.train.distill.packing import Packing, Row, assign, batch_of
from outrider.train.distill.prompts import Prompt
from outrider.train.distill.sample import Sample
from outrider.train.distill.store import Dataset, samples_of

SLOTS = 20
"""A mixture's shares are multiples of 1/SLOTS."""


class RowSource(Protocol):
    """Rows by number."""

    def prepare(self, step: int) -> None:
        """Makes what the rows of this step need; called once before each step."""

    def row(self, number: int) -> list[Sample]:
        """The samples of a row."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""


class FixedRows:
    """Rows of fixed samples, each sample once an epoch.

    Args:
        dataset: the samples.
        capacity: most tokens of a row; 0 puts one sample into each.
        seed: of the order.
    """

    def __init__(self, dataset: Dataset, capacity: int, seed: int) -> None:
        self.dataset = dataset
        self.packing = Packing(dataset.sizes, capacity, seed)

    def prepare(self, step: int) -> None:
        """Nothing to make."""

    def row(self, number: int) -> list[Sample]:
        return [self.dataset[index] for index in self.packing[number]]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class DraftSamples:
    """Rows of the draft's own samples, drawn anew every few steps.

    Args:
        engine: decodes the draft, with the weights that are being trained.
        prompts: answered in turn, in a shuffled order.
        how: temperatures, lengths and seed of the answers.
        score: gives samples the target's cells.
        every: steps between two refreshes.
        per_refresh: prompts answered at each.
        buffer: most samples kept: as many as a refresh makes for on-policy training, more for
            replay.
        capacity: most tokens of a row; 0 puts one sample into each.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        how: Answering,
        score: Callable[[Sequence[Sample]], list[Sample]],
        *,
        every: int,
        per_refresh: int,
        buffer: int,
        capacity: int,
    ) -> None:
        self.engine, self.prompts, self.how, self.score = engine, prompts, how, score
        self.every, self.per_refresh, self.capacity = every, per_refresh, capacity
        self.buffer = max(buffer, per_refresh)
        self.samples: list[Sample] = []
        self.refreshes = 0
        self._rows: list[list[int]] = []

    def prepare(self, step: int) -> None:
        """Draws new samples where a refresh is due."""
        if step // self.every < self.refreshes:
            return
        fresh = self.score(self._drawn(self.refreshes))
        self.samples = [*self.samples, *fresh][-self.buffer :]
        self.refreshes += 1
        self._arrange()

    def row(self, number: int) -> list[Sample]:
        return [self.samples[index] for index in self._rows[number % len(self._rows)]]

    def state_dict(self) -> dict[str, Any]:
        cells = [sample.cells for sample in self.samples if sample.cells is not None]
        state = {
            "refreshes": self.refreshes,
            "tokens": torch.tensor([token for each in self.samples for token in each.tokens]).int(),
            "lengths": torch.tensor([len(each.tokens) for each in self.samples]).int(),
            "firsts": torch.tensor([each.first for each in self.samples]).int(),
        }
        if cells:
            joined = Cells.cat(cells)
            state |= {"ids": joined.ids_Nk, "log_p": joined.log_p_NC}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.refreshes = state["refreshes"]
        self.samples = samples_of(state)
        if "ids" in state:
            counts = [sample.num_positions for sample in self.samples]
            parts = zip(state["ids"].split(counts), state["log_p"].split(counts), strict=True)
            self.samples = [
                replace(sample, cells=Cells(*part))
                for sample, part in zip(self.samples, parts, strict=True)
            ]
        self._arrange()

    def _drawn(self, refresh: int) -> list[Sample]:
        """The samples of a refresh."""
        numbers = range(refresh * self.per_refresh, (refresh + 1) * self.per_refresh)
        chosen = []
        for number in numbers:
            epoch, position = divmod(number, len(self.prompts))
            order = permutation(self.how.seed, epoch, len(self.prompts))
            chosen.append(self.prompts[int(order[position])].tokens)
        kinds = self.how.temperatures
        temperatures = [kinds[number % len(kinds)] for number in numbers]
        samples = sampled(self.engine, chosen, self.how, temperatures, numbers[0])
        if not samples:
            raise ValueError(
                f"none of {len(chosen)} prompts leaves room for an answer in rows of "
                f"{self.how.length} tokens; give shorter prompts or longer rows"
            )
        return samples

    def _arrange(self) -> None:
        """Puts the buffer into rows, in an order that differs between refreshes."""
        order = permutation(self.how.seed + self.refreshes, 0, len(self.samples)).tolist()
        if not self.capacity:
            self._rows = [[index] for index in order]
            return
        self._rows = assign([each.num_inputs for each in self.samples], order, self.capacity)


class StepRows:
    """The rows of each step, from one source or from several by shares.

    Args:
        shares: share of the rows of each source; they sum to one.
        rows: of a step.

    Attributes:
        positions: positions trained on so far.
    """

    def __init__(self, shares: Mapping[str, tuple[RowSource, float]], rows: int) -> None:
        self.sources = {name: source for name, (source, _) in shares.items()}
        self.rows, self.positions = rows, 0
        self.pattern = interleaved({name: share for name, (_, share) in shares.items()})

    def __call__(self, step: int) -> list[Row]:
        for source in self.sources.values():
            source.prepare(step)
        batch = batch_of(
            self._row(number) for number in range(step * self.rows, (step + 1) * self.rows)
        )
        self.positions += sum(len(row.predicts_N) for row in batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        sources = {name: source.state_dict() for name, source in self.sources.items()}
        return {"positions": self.positions, "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.positions = state["positions"]
        for name, source in self.sources.items():
            source.load_state_dict(state["sources"][name])

    def _row(self, number: int) -> list[Sample]:
        block, slot = divmod(number, len(self.pattern))
        name = self.pattern[slot]
        earlier = block * self.pattern.count(name) + self.pattern[:slot].count(name)
        return self.sources[name].row(earlier)


def interleaved(shares: Mapping[str, float]) -> list[str]:
    """Names in a repeating pattern in which each has its share, as evenly spread as possible.

    Raises:
        InvalidParameterError: shares that are not positive, do not sum to one, or are no multiples
            of 1/SLOTS.
    """
    total = sum(shares.values())
    if not shares or abs(total - 1) > 1e-6 or min(shares.values()) <= 0:
        raise InvalidParameterError(
            f"shares {dict(shares)} sum to {total:g}; they must be positive and sum to 1"
        )
    if len(shares) == 1:
        return list(shares)
    slots = {name: round(share * SLOTS) for name, share in shares.items()}
    for name, share in shares.items():
        if not slots[name] or abs(slots[name] / SLOTS - share) > 1e-6:
            raise InvalidParameterError(
                f"share {share:g} of {name}: must be a multiple of {1 / SLOTS:g}"
            )
    pattern: list[str] = []
    for length in range(1, SLOTS + 1):
        behind = {n: count * length / SLOTS - pattern.count(n) for n, count in slots.items()}
        pattern.append(max(behind, key=lambda name: behind[name]))
    return pattern
