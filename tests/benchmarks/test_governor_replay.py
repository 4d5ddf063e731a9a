"""Replays of outputs: what rounds commit, how long they take, and the page."""

from argparse import Namespace
from collections.abc import Sequence

import pytest
import torch
from simulated_rounds import Machine as Simulated
from tiny_models import engine_of, greedy, ragged_prompts, tiny

from benchmarks.governor_cases import add_noise
from benchmarks.governor_replay import (
    Fixed,
    Machine,
    Output,
    Share,
    Subject,
    markdown,
    outputs_of,
    replay,
    replay_cells,
    replay_mixed,
)
from outrider.engine.governor.costs import RoundCosts
from outrider.engine.governor.sources import Sources

LENGTHS = (0, 1, 2, 3, 5, 8)


@pytest.fixture(scope="module")
def machine() -> Machine:
    """Rounds take the times of a simulated machine, whose draft steps take a tenth of a pass."""
    simulated, costs = Simulated(noise=0), RoundCosts(0.1)
    for rows in (1, 2, 4):
        for length in range(9):
            draft, total = simulated.draft(rows, length), simulated.round(rows, length)
            costs.assume(rows, length, draft, total)
    return Machine(costs, 4, LENGTHS)


def output(right: Sequence[int], repeats: int) -> Output:
    """An output whose draft is right at these tokens, again and again."""
    pattern = tuple(bool(each) for each in right) * repeats
    return Output((7, 8, 9), tuple(range(len(pattern))), pattern)


def test_a_round_commits_what_is_right_and_the_next_token(machine: Machine) -> None:
    """With drafts of two: wrong at once, then two right ones, and one token is left, for which
    nothing is drafted."""
    wrong_first = output([0, 1, 1, 1, 1], 1)
    reading = machine.reading(1, 3)
    rounds = 2 * machine.round(1, 2) + machine.round(1, 0)
    assert replay(Fixed(2), [wrong_first], machine) == pytest.approx(reading + rounds)
    assert replay(Fixed(0), [wrong_first], machine) == pytest.approx(5 * machine.round(1, 0))


def test_rows_that_have_ended_leave_the_batch(machine: Machine) -> None:
    """One row is always right, the other one never."""
    right, wrong = output([1], 4), output([0], 4)
    rounds = machine.round(2, 1) * 2 + machine.round(1, 1) + machine.round(1, 0)
    seconds = replay(Fixed(1), [right, wrong], machine)
    assert seconds == pytest.approx(machine.reading(2, 3) + rounds)


def test_engines_take_as_many_rounds(machine: Machine) -> None:
    """Replayed rounds of a fixed length commit what those of an engine do."""
    target, draft = tiny(dtype=torch.float64), tiny(dtype=torch.float64)
    add_noise(draft.module, 0.1)
    engine = engine_of(target, draft, γ=2)
    for prompt in ragged_prompts([4, 9, 6]):
        (recorded,) = outputs_of(engine, [prompt], 24)
        results = engine.generate([prompt], greedy(24))
        assert results[0].token_ids == recorded.tokens
        asked = _Counted(2)
        replay(asked, [recorded], machine)
        assert asked.num_rounds == results.stats.rounds
        assert 0 < sum(recorded.right) < 24, "a draft that is always right or wrong shows nothing"


class _Counted(Fixed):
    num_rounds = 0

    def learn(self, *_: object, **__: object) -> None:
        self.num_rounds += 1


OPTIONS = Namespace(seeds=2, turns=4, noise=0.05, error=0.1)


def test_the_governor_finds_the_best_length(machine: Machine) -> None:
    """Drafts that are always right are long, and those that never are cost little."""
    outputs = {("right", 1): [output([1], 96)], ("wrong", 2): [output([0], 96)] * 2}
    subject = Subject(machine, Sources(LENGTHS), outputs, (0, 1, 2, 5, 8))
    cells = replay_cells(subject, OPTIONS)
    assert cells["right, 1"]["best"] == 8
    assert 0.9 < cells["right, 1"]["over_best"].mean <= 1
    assert cells["wrong, 2"]["best"] == 0
    assert 0.95 < cells["wrong, 2"]["over_plain"].mean <= 1
    assert 0.8 < replay_mixed(subject, OPTIONS).mean <= 1
    again = replay_cells(subject, OPTIONS)
    assert again == cells, "a replay depends on its seed alone"


def test_the_page_counts_the_cells_that_meet_the_bars() -> None:
    cell = {
        "best": 2,
        "best_over_plain": 1.2,
        "over_plain": Share(1.14, 0.01),
        "over_best": Share(0.94, 0.01),
    }
    none = {"best": 0, "best_over_plain": 1.0, "over_plain": Share(0.98, 0.0), "over_best": None}
    about = {"date": "d", "hardware": "h", "threads": 1, "versions": {"torch": "t"}}
    about |= {"command": "c", "tokens": 128, "seeds": 2}
    found = {"cells": {"code, 1": cell, "chat, 4": none}, "mixed": Share(0.961, 0.002)}
    page = markdown({"about": about, "drafts": {"good": found}})
    assert "plain decoding: 2 of 2 cells at 0.97 or more, the lowest 0.980" in page
    assert "where drafts pay: 0 of 1 cells at 0.95 or more, the lowest 0.940" in page
    assert "good draft: 0.961 ± 0.002 of the best" in page
    assert "| good | code | 1 | 1.140 ± 0.010 | 2 | 1.200 | 0.940 ± 0.010 |" in page
    assert "| good | chat | 4 | 0.980 ± 0.000 | 0 | 1.000 | - |" in page
