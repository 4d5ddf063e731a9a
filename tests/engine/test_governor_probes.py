"""Probes that go on for several rounds, since one would say too little. No clock is read."""

from collections.abc import Callable

from outrider.engine.governor.acceptance import Kind
from outrider.engine.governor.batch_governor import BatchGovernor
from outrider.engine.governor.governor import Governor
from outrider.engine.governor.probes import ROUNDS_OF_NONE
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.governor.saved_times import RoundTime
from outrider.engine.governor.sources import Sources

Seconds = Callable[[int, bool], float]
"""Of a round, by the draft length and whether the round before drafted."""


def times(plain: float, step: float) -> list[RoundTime]:
    """Of rounds of one row, drafts taking half of what they add."""
    lengths = (0, 1, 2, 3, 5, 8)
    return [RoundTime(True, 1, n, 0.5 * step * n, plain + step * n) for n in lengths]


def lengths_of(
    governor: Governor, rounds: int, right: tuple[bool, ...], took: Seconds
) -> list[int]:
    """The draft lengths of a greedy row, at whose tokens the draft is right and wrong in turn."""
    batch, rows, place, found = BatchGovernor(governor), [RowMemory(True)], 0, list[int]()
    for _ in range(rounds):
        asked = batch.ask(rows, [8], True)
        seconds = took(asked.length, bool(found and found[-1]))
        hits = (right[(place + k) % len(right)] for k in range(asked.length))
        accepted = next((k for k, hit in enumerate(hits) if not hit), asked.length)
        place += accepted + 1
        batch.learn(asked, rows, [accepted], True, 0.2 * asked.length, seconds)
        found.append(asked.length)
    return found


def knowing(plain: float, step: float, acceptance: float) -> Governor:
    """A governor that was told times and an acceptance."""
    governor = Governor(Sources())
    governor.assume(times(plain, step))
    right = round(100 * acceptance)
    governor.rates(Kind(True), 0).review([1.0] * right + [0.0] * (100 - right), governor.now)
    return governor


def test_drafts_that_are_wrong_at_every_third_token_become_long_enough() -> None:
    """Of one token, they are right and wrong in turn; of two, always right: rounds then emit three
    tokens, and the next draft begins after the wrong one again."""
    found = lengths_of(
        knowing(1.0, 0.4, 0.5), 120, (True, True, False), lambda length, _: 1.0 + 0.4 * length
    )
    assert found[:8] == [1] * 8
    assert sum(length >= 2 for length in found[-40:]) >= 36


def test_drafting_nothing_is_measured_in_rounds_that_follow_each_other() -> None:
    """It seems slower than it is, drafts seem to pay, and the first round without a draft takes
    longer than the next ones: the one that a probe would measure."""

    def took(length: int, drafted: bool) -> float:
        return 1.0 + 0.4 * length + (0.15 if drafted and not length else 0.0)

    found = lengths_of(knowing(1.1, 0.3, 0.33), 400, (True, False, False, False), took)
    first = found.index(0)
    assert found[first : first + ROUNDS_OF_NONE] == [0] * ROUNDS_OF_NONE
    assert sum(length == 0 for length in found[-100:]) > 80


def test_a_shorter_draft_is_measured_seldom_unless_little_is_missing() -> None:
    """The longer draft shows all that the shorter one accepts, so that only its time may be wrong,
    and not by so much."""

    def shorter(step: float) -> int:
        governor = knowing(1.0, step, 0.97)
        found = lengths_of(governor, 300, (True,), lambda length, _: 1.0 + step * length)
        assert sum(length == 8 for length in found) > 270
        return sum(length < 8 for length in found[10:])

    assert shorter(0.2) == 0
    assert 0 < shorter(0.45) < 12


def test_a_draft_of_which_only_hope_is_left_is_compared_with_no_longer_one() -> None:
    """It may pay if the row accepts more than is believed of it; the longer one promises less."""
    governor = knowing(1.0, 0.45, 0.4)
    governor.costs(True, 0).observe_plain(1, [1.0] * 60)  # no draft was measured lately
    found = lengths_of(governor, 16, (False,), lambda length, _: 1.0 + 0.45 * length)
    assert found[:3] == [1] * 3
    assert max(found) == 1
    assert found[-6:] == [0] * 6


def test_rows_that_come_or_go_are_no_reason_to_read_much_for_a_probe() -> None:
    """Nothing can be reviewed in the first round of other rows, but reviews still show whether
    drafts pay. The credit for probes that read first has grown meanwhile."""
    governor = knowing(1.0, 1.0, 0.3)
    batch, rows, drafted = BatchGovernor(governor), [RowMemory(True)], list[int]()
    governor.retry_credit = 1000.0
    rows[0].of(0).undrafted = 500
    for number in range(400):
        is_new = number % 20 == 0
        rows = [*rows] if is_new else rows
        asked = batch.ask(rows, [8], True, 0 if is_new else min(8, number % 20))
        assert governor.behind(0, rows) > 100
        batch.learn(
            *(asked, rows, [0], True, 0.5 * asked.length, 1.0 + asked.length),
            reviewed=[[0.0] * 8] if asked.reviews else (),
        )
        drafted.append(asked.length)
    assert not any(drafted[20:])
