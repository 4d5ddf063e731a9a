"""Rests: rounds without drafts in which nothing is chosen, and the repetition that ends them."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from simulated_rounds import Machine, Simulation, constant
from tiny_models import engine_of, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.drafters import ModelDrafter
from outrider.engine.governor.acceptance import Kind
from outrider.engine.governor.batch_governor import HEED, LONGEST_REST, Balance, BatchGovernor
from outrider.engine.governor.governor import REVIEW_SHARE, Governor
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.repetition import Repetition
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.governor.saved_times import RoundTime
from outrider.engine.governor.sources import Sources

AUTO: Any = "auto"
DEAR = Machine(per_token=0.3, step=0.3)  # reading a token costs the draft model a tenth of a round
TIMES = [RoundTime(True, 1, length, 0.3 * length, 1.0 + 0.6 * length) for length in (0, 1, 3, 8)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds in which batches choose."""
    planned: list[int] = []
    plan = BatchGovernor._plan

    def counting(self: BatchGovernor, *arguments: Any) -> Any:
        planned.append(self._now)
        return plan(self, *arguments)

    monkeypatch.setattr(BatchGovernor, "_plan", counting)
    return planned


def useless(governor: Governor) -> None:
    """Teaches a governor that greedy rows accept nothing, whether they repeat themselves or not."""
    governor.assume(TIMES)
    for repeats in (False, True):
        governor.rates(Kind(True, repeats), 0).review([0.0] * 100, governor.now)


class Greedy:
    """A greedy row that drafts nothing by itself, and the rounds of its batch.

    Args:
        governor: knows times and acceptance.
    """

    def __init__(self, governor: Governor) -> None:
        self.output: list[int] = []
        self.rows = [RowMemory(True, output=self.output)]
        self._batch = BatchGovernor(governor)
        self._unreviewed = 0

    def run(self, rounds: int, token: Callable[[int], int], label: float = 0.0) -> list[Asked]:
        """Rounds in which the target emits the given tokens; reviews find the given acceptance."""
        found = []
        for number in range(rounds):
            asked = self._batch.ask(self.rows, [8], True, self._unreviewed)
            found.append(asked)
            labels = [[label] * self._unreviewed] if asked.reviews else []
            self._unreviewed = 0 if asked.length or labels else min(16, self._unreviewed + 1)
            self.output.append(token(number))
            draft = 1.5 if labels else 0.3 * asked.length
            total = 1.0 + draft + 0.3 * asked.length
            self._batch.learn(asked, self.rows, [0], True, draft, total, reviewed=labels)
        return found


def test_nothing_is_chosen_while_a_batch_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reviews are dear, some rests last as long as they may."""
    planned = counted(monkeypatch)
    simulation = Simulation(DEAR, 4, seed=1, can_review=True)
    simulation.run(300, constant(0.02))
    planned.clear()
    asked = simulation.run(10 * LONGEST_REST, constant(0.02)).asked
    assert {each.length for each in asked if not each.probe} == {0}
    assert len(planned) <= 16
    assert len({id(each) for each in asked}) <= 2 * len(planned) + 1


def test_a_rest_is_learned_once_and_counted_to_the_last_round() -> None:
    governor = Governor(Sources())
    useless(governor)
    row, before = Greedy(governor), governor.now
    row.run(5, lambda number: number)
    assert governor.now == before  # the rest goes on
    row._batch.ask([*row.rows], [8], True)  # a new list: other rows
    assert governor.now == before + 5
    assert row.rows[0].of(0).undrafted == 5


def test_a_row_that_is_over_ends_a_rest() -> None:
    governor = Governor(Sources())
    useless(governor)
    batch, rows = BatchGovernor(governor), [RowMemory(True), RowMemory(True)]
    for accepted in ([0, 0], [0, 0], [0, None]):
        batch.learn(batch.ask(rows, [8, 8], True), rows, accepted, True, 0.0, 1.0)
    assert governor.now == 3
    assert [row.of(0).undrafted for row in rows] == [3, 3]


def test_repetition_begins_and_ends() -> None:
    repetition = Repetition(range(100, 140))
    loop = [number % 5 for number in range(40)]
    began = [number for number, token in enumerate(loop) if repetition.take([token])]
    assert began == [14]  # a period, two tokens before the first repeated one, and eight of them
    ended = [number for number in range(40) if repetition.take([200 + number])]
    assert ended == [6]
    assert not repetition.is_on


def test_a_prompt_that_repeats_itself_counts() -> None:
    assert RowMemory(True, [1, 2, 3] * 8).kind == Kind(True, repeats=True)
    assert RowMemory(True, [1, 2, 3] * 8).has_changed
    assert RowMemory(False, [1, 2, 3] * 8).kind == Kind(False)  # samples leave their loops


def test_text_at_random_gives_no_alarm() -> None:
    """Of 40 tokens: eight of ten in a row have to be repeated, each with probability 1/40 at most,
    so that an alarm in 5,000 tokens has a probability below 5000 * C(10, 8) * 40^-8 < 1e-7."""
    drawn, repetition = random.Random(1), Repetition()
    assert not any(repetition.take([drawn.randrange(40)]) for _ in range(5000))


def test_a_row_that_begins_to_repeat_itself_is_reviewed_at_once() -> None:
    governor = Governor(Sources())
    governor.assume(TIMES)
    for repeats in (False, True):  # too little for drafts to pay
        governor.rates(Kind(True, repeats), 0).review([1.0] * 30 + [0.0] * 70, governor.now)
    governor.review_credit = 4.0
    row = Greedy(governor)
    calm = row.run(60, lambda number: number)
    reviews = sum(each.reviews for each in calm)
    assert reviews <= 1
    governor.review_credit = 4.0
    loop = row.run(40, lambda number: 1000 + number % 4, label=1.0)
    first = next(number for number, each in enumerate(loop) if each.reviews)
    assert first <= 4 + 2 + 8 + HEED
    assert loop[first + 2].length > 0  # all would have been accepted: it drafts at once


def test_changes_are_reviewed_within_the_share() -> None:
    """A row that begins and ceases to repeat itself again and again, which shows nothing."""
    governor = Governor(Sources())
    governor.assume(TIMES)
    for repeats in (False, True):
        governor.rates(Kind(True, repeats), 0).review([1.0] * 30 + [0.0] * 70, governor.now)
    row = Greedy(governor)

    def token(number: int) -> int:
        return number % 3 if number // 30 % 2 else number

    rounds = 3000
    asked = [
        each
        for turn in range(rounds // 30)
        for each in row.run(30, lambda n, first=30 * turn: token(first + n), label=0.35)
    ]
    reviews = sum(each.reviews for each in asked)
    assert 5 < reviews < 1.2 * rounds * REVIEW_SHARE / 1.5 + 4  # of 1.5 rounds each


def test_where_nothing_is_accepted_changes_are_no_reason_to_look() -> None:
    governor = Governor(Sources())
    useless(governor)
    row = Greedy(governor)
    asked = row.run(400, lambda number: number % 3 if number // 30 % 2 else number)
    assert sum(each.reviews for each in asked) <= 4  # where 13 changes fall


def test_rows_that_repeat_themselves_have_estimates_of_their_own() -> None:
    governor, row = Governor(Sources()), RowMemory(True, [1, 2] * 20)
    batch = BatchGovernor(governor)
    for _ in range(20):
        asked = batch.ask([row], [8], True)
        batch.learn(asked, [row], [asked.length], True, 0.1 * asked.length, 1.0)
    beliefs = governor.beliefs(1, greedy=True)
    assert beliefs["acceptance, draft, repeating"][0] > 0.7
    assert beliefs["acceptance, draft"][0] == pytest.approx(0.6)


def test_a_drafter_that_never_drafts_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept for it: rows come, run and leave as in plain decoding."""
    target, draft = tiny(std=0.2), tiny(seed=0, std=0.19)
    prompts = ragged_prompts([7, 1, 9, 3])
    sampling = Sampling(temperature=0, max_new_tokens=20, ignore_eos=True)
    plain = token_ids(engine_of(target).generate(prompts, sampling))
    monkeypatch.setattr(BatchGovernor, "reads_prompts", lambda *_: False)
    monkeypatch.setattr(
        BatchGovernor, "ask", lambda self, rows, limits, *_: Asked(0, 0, [0] * len(limits))
    )

    def refuse(*_: Any) -> None:
        raise AssertionError

    for name in ("start_late", "begin", "join", "propose", "commit"):
        monkeypatch.setattr(ModelDrafter, name, refuse)
    engine = engine_of(target, draft, "speculative", AUTO, max_batch_size=3)
    assert token_ids(engine.generate(prompts, sampling)) == plain


def test_drafts_that_lose_by_the_clock_are_followed_by_ever_longer_pauses() -> None:
    """And by none for other rows, or once a review has shown something new."""
    balance, rows, now = Balance(), [RowMemory(True)], 0
    balance.plain_rate = 1.0
    pauses = []
    for _ in range(4):
        for _ in range(8):
            assert not balance.forbids(now, rows)
            balance.add(now, Asked(0, 2, [2]), rows, tokens=2, seconds=2.1)
            now += 1
        pauses.append(0)
        while balance.forbids(now, rows):
            assert not balance.forbids(now, [*rows])
            pauses[-1], now = pauses[-1] + 1, now + 1
    assert pauses == [15, 31, 63, 127]
    for _ in range(8):
        balance.add(now, Asked(0, 2, [2]), rows, tokens=2, seconds=2.1)
    assert balance.forbids(now, rows)
    balance.lift()
    assert not balance.forbids(now, rows)


def test_rounds_before_a_review_do_not_count_with_those_after_it() -> None:
    """The review has shown that drafts have become better or worse."""
    balance, rows, now = Balance(), [RowMemory(True)], 0
    balance.plain_rate = 1.0
    for _ in range(7):
        balance.add(now := now + 1, Asked(0, 2, [2]), rows, tokens=1, seconds=2.0)
    balance.lift()
    for gained in [0.0] * 7 + [8.0]:
        found = balance.add(now := now + 1, Asked(0, 2, [2]), rows, tokens=3, seconds=2.0)
        assert found == gained
        assert not balance.forbids(now, rows)


def test_the_balance_tells_what_drafts_gained() -> None:
    """Once for every eight rounds."""
    balance, rows = Balance(), [RowMemory(True)]
    balance.plain_rate = 1.0
    gains = [balance.add(now, Asked(0, 2, [2]), rows, tokens=3, seconds=2.0) for now in range(16)]
    assert gains == [0.0] * 7 + [8.0] + [0.0] * 7 + [8.0]


def test_drafts_that_gain_are_followed_by_no_pause() -> None:
    balance, rows = Balance(), [RowMemory(True)]
    balance.plain_rate = 1.0
    for now in range(40):
        balance.add(now, Asked(0, 2, [2]), rows, tokens=2, seconds=1.9)
        balance.add(now, Asked(0, 2, [2], behind=50), rows, tokens=1, seconds=40.0)
        balance.add(now, Asked(0, 2, [2], probe=True), rows, tokens=1, seconds=4.0)
        assert not balance.forbids(now, rows)


def test_rounds_that_make_good_for_lost_ones_are_followed_by_no_pause() -> None:
    """A choice stands for several rounds, so that drafts go on after eight rounds that lost."""
    balance, rows, now = Balance(), [RowMemory(True)], 0
    balance.plain_rate = 1.0
    for _ in range(8):
        balance.add(now := now + 1, Asked(0, 2, [2]), rows, tokens=1, seconds=2.0)
    for gained in range(1, 8):
        balance.add(now := now + 1, Asked(0, 2, [2]), rows, tokens=3, seconds=1.5)
        assert balance.forbids(now, rows) == (1.5 * gained < 8.0)
    balance.add(now := now + 1, Asked(0, 2, [2]), rows, tokens=3, seconds=1.5)
    assert not balance.forbids(now, rows)  # eight rounds that gained begin the count anew


def test_rounds_of_a_row_before_it_repeats_itself_do_not_count_with_those_after_it() -> None:
    """Seven rounds lose, which a draft that is right after the change does not make good for."""
    governor = Governor(Sources())
    governor.assume(TIMES)
    for repeats in (False, True):
        governor.rates(Kind(True, repeats), 0).review([1.0] * 90 + [0.0] * 10, governor.now)
    output: list[int] = []
    rows, batch = [RowMemory(True, output=output)], BatchGovernor(governor)
    assert batch.ask(rows, [8], True, reviewable=1).length
    for accepted in [0] * 7 + [2]:
        if accepted:
            output += [7] * 20
            rows[0].follow()
        batch.learn(Asked(0, 2, [2]), rows, [accepted], True, 0.6, 2.2)
    assert batch.ask(rows, [8], True).length
