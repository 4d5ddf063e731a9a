"""Tuning on simulated machines: what it measures, predicts, chooses, and the time that it keeps.

The machines' laws are known, so that the right answers are. No test reads a real clock.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import pytest
from simulated_machine import SimulatedMachine

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.speedup import speedup
from outrider.lab.analysis.tokens_per_round import expected_tokens
from outrider.lab.tune.acceptance import Acceptance, tokens_per_round
from outrider.lab.tune.answer import Estimate, choose
from outrider.lab.tune.costs import PassTable, RestTable
from outrider.lab.tune.halving import Configuration, Trials
from outrider.lab.tune.machine import PLAIN, RowRound, Source, rounds_of
from outrider.lab.tune.predict import (
    NOTHING_DRAFTED,
    RoundTimes,
    predicted_speed,
    steady_speed,
)
from outrider.lab.tune.time_budget import TimeBudget
from outrider.lab.tune.tuner import Tuner
from outrider.lab.tune.tuning import TuneSettings

GOOD = [0.9, 0.85, 0.8, 0.8, 0.75, 0.75, 0.7, 0.7]
POOR = [0.2] * 8
HEAD = Source("the head", "eagle3", "head", fades=True)
COPIES = Source("prompt lookup", "prompt-lookup")


def memory_bound(rows: int, width: int) -> float:
    """A pass that reads weights for 20 ms, and computes 0.4 ms per token beyond 16 tokens."""
    return 0.020 + 0.0004 * max(0, rows * width - 16)


def two_sources(**more: Any) -> SimulatedMachine:
    return SimulatedMachine(
        {"the head": GOOD, "prompt lookup": [0.5] * 8},
        {"the head": lambda rows: 0.002 + 0.0001 * rows, "prompt lookup": lambda rows: 0.0},
        memory_bound,
        **more,
    )


def tuned(
    machine: SimulatedMachine, sources: Sequence[Source] = (HEAD, COPIES), **more: Any
) -> Any:
    settings = TuneSettings(**({"batch_sizes": (1, 4, 16), "max_new_tokens": 64} | more))
    return Tuner(machine, sources, settings).run()


def rounds(accepted: Sequence[int], drafted: int) -> Acceptance:
    return Acceptance({0: [RowRound(drafted, n) for n in accepted]})


# ------------------------------------------------------------------------------------- acceptance


def test_acceptance_depends_on_the_position() -> None:
    """With 4,000 rounds, S_i is within 0.05 of the truth: more than six standard errors, which
    fails for a correct program with a probability below 1e-8."""
    machine = two_sources(num_prompts=40)
    run = machine.run(HEAD, 8, [[i, i + 1, i + 2, i + 3] for i in range(0, 36, 4)] * 10, 400, 0)
    expected = list(accumulate(GOOD, mul))
    acceptance = Acceptance(rounds_of(run, 400, 8))
    assert len(acceptance.all_rounds) > 4000
    assert acceptance.survival(8) == pytest.approx(expected, abs=0.05)
    positions = [each for each in acceptance.by_position(8) if each is not None]
    assert [share for share, _, _ in positions] == pytest.approx(GOOD, abs=0.05)
    assert all(low <= share <= high for share, low, high in positions)


def test_rounds_without_room_for_a_full_draft_are_not_counted() -> None:
    """Otherwise the cut drafts at the ends of outputs would make late positions look rejected."""
    machine = SimulatedMachine({"s": [1.0] * 8}, {"s": lambda rows: 0.0}, memory_bound)
    run = machine.run(Source("s", "speculative"), 8, [[0], [1]], 40, 0)
    found = Acceptance(rounds_of(run, 40, 8))
    assert found.survival(8) == [1.0] * 8
    naive = [depth for batch in run.depths for row in batch for depth in row]
    assert min(naive) < 8


def test_a_source_that_finds_nothing_accepts_nothing() -> None:
    found = Acceptance({0: [RowRound(0, 0), RowRound(4, 4), RowRound(4, 1), RowRound(2, 2)]})
    assert found.survival(4) == [0.75, 0.5, 0.25, 0.25]
    assert found.tokens(4) == 1 + 0.75 + 0.5 + 0.25 + 0.25
    assert found.by_position(4)[0] == pytest.approx((1.0, 0.4385, 1.0), abs=1e-3)
    assert found.by_position(4)[2] == pytest.approx((1.0, 0.2065, 1.0), abs=1e-3)
    assert found.by_position(5)[4] is None
    assert found.drafted(3) == 2.0


def test_short_drafts_take_more_rounds_where_long_ones_are_good() -> None:
    """Of ten tokens that can be copied and four that cannot, a draft of eight takes the ten in two
    rounds of six: a third. A draft of two takes them in four rounds of eight."""
    long = rounds([8, 1, 0, 0, 0, 0], 8)
    assert long.survival(1) == [pytest.approx(2 / 6)]
    assert long.with_drafts_of(2) == rounds([2, 2, 2, 1, 0, 0, 0, 0], 2)
    assert long.with_drafts_of(8) is long
    assert long.tokens(2) == pytest.approx(1 + 7 / 8)


def test_a_source_that_stopped_by_itself_stops_in_short_drafts_too() -> None:
    found = Acceptance({0: [RowRound(8, 0), RowRound(3, 3), RowRound(3, 2), RowRound(0, 0)]})
    assert found.with_drafts_of(2).rounds == {
        0: [RowRound(2, 0), RowRound(2, 2), RowRound(2, 2), RowRound(0, 0)]
    }
    assert found.with_drafts_of(1).rounds == {
        0: [RowRound(1, 0), RowRound(1, 1), RowRound(1, 1), RowRound(1, 1), RowRound(1, 0),
            RowRound(0, 0)]
    }  # fmt: skip


def test_drafts_that_fade_are_cut() -> None:
    """A head's fifth token is worse than its first: the middle of a long draft says nothing about
    the beginning of a short one."""
    fading = Acceptance({0: [RowRound(8, 8), RowRound(8, 1)]}, fades=True)
    assert fading.with_drafts_of(2).rounds == {0: [RowRound(2, 2), RowRound(2, 1)]}
    assert fading.and_of({1: [RowRound(8, 3)]}).fades


# ------------------------------------------------------------------------------------ predictions


@pytest.mark.parametrize("gamma", [1, 3, 7])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.8, 1.0])
def test_steady_speed_is_leviathans_formula(alpha: float, gamma: int) -> None:
    """Theorem 3.8 with β: tokens (1 - α^(γ+1)) / (1 - α) in c γ + β steps."""
    t, c, beta = 0.05, 0.1, 1.3
    survival = [alpha**i for i in range(1, gamma + 1)]
    times = RoundTimes(lambda rows, width: t * beta if width > 1 else t, lambda rows: c * gamma * t)
    assert tokens_per_round(survival) == pytest.approx(expected_tokens(alpha, gamma))
    plain = steady_speed([], 1, RoundTimes(times.target, lambda rows: 0.0))
    assert plain == pytest.approx(1 / t)
    assert steady_speed(survival, 1, times) / plain == pytest.approx(speedup(alpha, gamma, c, beta))


def test_predicted_speed_of_plain_decoding_is_exact() -> None:
    times = RoundTimes(
        lambda rows, width: 0.02 + 0.001 * rows, lambda rows: 0.003, lambda rows: 0.5
    )
    speed = predicted_speed(NOTHING_DRAFTED, 0, times, [[0, 1], [2]], {0: 30, 1: 10, 2: 20})
    seconds = 0.5 + 10 * 0.025 + 20 * 0.024 + 0.5 + 20 * 0.024
    assert speed == pytest.approx(60 / seconds)


def test_predicted_speed_tends_to_the_steady_speed() -> None:
    """All rounds accept the same number, so that there is no chance in it."""
    times = RoundTimes(lambda rows, width: 0.02 * width, lambda rows: 0.01)
    always = rounds([2, 2], 4)
    speed = predicted_speed(always, 4, times, [[0]], {0: 30_000})
    assert speed == pytest.approx(steady_speed([1, 1, 0, 0], 1, times), rel=1e-3)


def test_predicted_speed_knows_that_rows_wait_for_the_slowest() -> None:
    """A batch of an easy and a hard prompt ends with the hard one."""
    times = RoundTimes(lambda rows, width: 0.02, lambda rows: 0.0)
    mixed = Acceptance({0: [RowRound(4, 4)], 1: [RowRound(4, 0)]})
    assert predicted_speed(mixed, 4, times, [[0, 1]], {0: 50, 1: 50}) == pytest.approx(100 / 1.0)


def test_a_short_draft_takes_a_narrow_pass() -> None:
    """A source that finds something in half of the rounds: the width is that of the longest draft
    of the rows that run."""
    times = RoundTimes(lambda rows, width: float(width), lambda rows: 0.0)
    half = Acceptance({0: [RowRound(4, 0), RowRound(0, 0)]})
    one = predicted_speed(half, 4, times, [[0]], {0: 400}, draws=200)
    assert one == pytest.approx(1 / (0.5 * 5 + 0.5 * 1), rel=0.02)
    two = predicted_speed(half, 4, times, [[0, 0]], {0: 400}, draws=200)
    assert two == pytest.approx(2 / (0.75 * 5 + 0.25 * 1), rel=0.02)


def test_tables_interpolate() -> None:
    passes = PassTable({(1, 1): 1.0, (1, 5): 2.0, (4, 1): 4.0, (4, 5): 8.0})
    assert passes.time(1, 3) == 1.5
    assert passes.time(2, 1) == 2.0
    assert passes.beta(4, 5) == 2.0
    rest = RestTable({(1, 2): 0.2, (1, 8): 0.8}, {1: 0.5})
    assert rest.time(1, 5, {1: 1.0}) == pytest.approx(0.5)
    assert rest.time(4, 5, {1: 1.0, 4: 3.0}) == pytest.approx(1.5)
    assert rest.per_token(1) == pytest.approx(0.1)
    assert rest.per_token(4) == 0.0
    assert rest.outside_of(1) == 0.5


@pytest.mark.parametrize("found", [1.0, 0.4])
def test_predictions_agree_with_what_is_measured(found: float) -> None:
    """Within 10 % at batch 1 and 15 % elsewhere, of every configuration that was repeated. The seed
    is fixed, so this never fails by chance."""
    result = tuned(two_sources(found={"prompt lookup": found}, num_prompts=32), minutes=8)
    errors = [
        (each.configuration.batch_size, each.error)
        for each in result.answer.estimates
        if each.error is not None and each.repeats > 1  # the outputs of one are drawn too seldom
    ]
    assert len(errors) > 9
    for size, error in errors:
        assert abs(error) < (0.10 if size == 1 else 0.15)


@pytest.mark.parametrize("ending", [0.0, 0.5])
def test_what_is_done_outside_of_rounds_is_predicted_too(ending: float) -> None:
    """Half a second after each batch, whose rounds take about as long in all."""
    machine = two_sources(ending=ending, num_prompts=16)
    result = tuned(machine, batch_sizes=(1, 4), minutes=10)
    measured = [each for each in result.answer.estimates if each.measured is not None]
    assert len(measured) > 4
    for each in measured:
        assert each.predicted == pytest.approx(each.measured, rel=0.12), each.configuration


def test_the_median_round_knows_nothing_of_a_disturbed_one() -> None:
    machine = two_sources(slowdown=lambda now: 50.0 if 100 <= now < 100.01 else 1.0, num_prompts=5)
    run = machine.run(PLAIN, 0, [[0], [1], [2]], 24, 0)
    round_seconds = machine.round_seconds(PLAIN, 0, 1, 1)
    assert run.median_round_seconds == pytest.approx(round_seconds)
    assert run.round_seconds == pytest.approx((50 + 1 + 1) / 3 * round_seconds)


@pytest.mark.parametrize("begins", [3.0, 6.0, 12.0])
def test_a_machine_that_becomes_slower_changes_no_ratio(begins: float) -> None:
    """From one of the probes on, everything takes 1.4 times as long. As many tokens are accepted in
    every round, so that there is no chance in it."""

    def machine(slowdown: float) -> SimulatedMachine:
        return SimulatedMachine(
            {"the head": [1.0, 1.0, 1.0, 0.0], "prompt lookup": [1.0, 0.0]},
            {"the head": lambda rows: 0.002, "prompt lookup": lambda rows: 0.0},
            memory_bound,
            slowdown=lambda now: slowdown if now > 100 + begins else 1.0,
        )

    same, slower = (
        {each.configuration: each.predicted_ratio for each in tuned(one).answer.estimates}
        for one in (machine(1.0), machine(1.4))
    )
    for each, ratio in slower.items():
        assert ratio == pytest.approx(same[each], rel=0.03), each


# ----------------------------------------------------------------------------------------- choice


def test_the_choice_is_among_those_that_were_repeated_most() -> None:
    """One lucky repeat is not a reason."""
    plain, lucky, first, second = (
        Configuration(source, length, 1)
        for source, length in ((PLAIN, 0), (COPIES, 8), (COPIES, 7), (HEAD, 3))
    )
    measured = {"predicted": 1.0, "predicted_ratio": 1.0, "measured": 1.0}
    answer = choose(
        [
            Estimate(plain, **measured, ratio=1.0, repeats=7),
            Estimate(lucky, **measured, ratio=1.92, repeats=1),
            Estimate(first, **measured, ratio=1.90, repeats=7),
            Estimate(second, **measured, ratio=1.85, repeats=7),
        ]
    )
    assert answer.best[1].configuration == first


def test_a_disturbed_repeat_does_not_count() -> None:
    """In one of seven repeats, other work makes the candidate ten times slower than usual."""
    machine, trials = two_sources(), Trials()
    plain, head = Configuration(PLAIN, 0, 1), Configuration(HEAD, 3, 1)
    for number in range(7):
        for each in (plain, head):
            disturbed = number == 3 and each == head
            machine.slowdown = (lambda now: 10.0) if disturbed else (lambda now: 1.0)
            trials.add(each, number, 0, machine.run(each.source, each.length, [[0], [1]], 64, 0))
    ratio = trials.ratio(head)
    assert ratio is not None
    assert len(ratio["repeats"]) == 6
    assert ratio["low"] > 2


def test_trials_are_repeated_while_there_is_time() -> None:
    """All prompts come before a second repeat of the first rung; the last rung has two left."""
    few, many = (
        tuned(two_sources(num_prompts=num), batch_sizes=(1,), minutes=20) for num in (2, 200)
    )
    longest = [
        max(len(found) for one, found in each.trials.repeats.items() if not one.is_plain)
        for each in (few, many)
    ]
    assert longest[0] == 8 * longest[1] == 56
    most = [one for one, found in few.trials.repeats.items() if len(found) == 56]
    assert len([one for one in most if not one.is_plain]) == 2


def test_what_is_compiled_for_trials_takes_no_time_from_their_repeats() -> None:
    """Ten seconds for each new length: fewer candidates are timed, but often enough."""
    machine = two_sources(compiling=10.0)
    result = tuned(machine, batch_sizes=(1,))
    assert result.seconds <= 300
    assert max(map(len, result.trials.repeats.values())) >= 3
    assert len({len(found) for found in result.trials.repeats.values()}) > 1


def exhaustive(machine: SimulatedMachine, sources: Sequence[Source], size: int) -> dict[Any, float]:
    """The speed of every configuration in long outputs."""
    found = {(PLAIN.name, 0): machine.steady_speed(PLAIN, 0, size)}
    for source in sources:
        for length in source.lengths:
            found[source.name, length] = machine.steady_speed(source, length, size)
    return found


@pytest.mark.parametrize("target", [memory_bound, lambda rows, width: 0.005 * rows * width])
@pytest.mark.parametrize(("first", "second"), [(GOOD, [0.5] * 8), (POOR, [0.7] * 8), (POOR, POOR)])
def test_the_choice_is_that_of_an_exhaustive_search(
    first: list[float], second: list[float], target: Callable[[int, int], float]
) -> None:
    """Within 5 % of the best configuration's speed. The outputs are long, so that prefill and the
    ends of outputs hardly count."""
    machine = SimulatedMachine(
        {"the head": first, "prompt lookup": second},
        {"the head": lambda rows: 0.002 + 0.0001 * rows, "prompt lookup": lambda rows: 0.0},
        target,
        prefill=0.0,
        num_prompts=8,
    )
    result = tuned(machine, minutes=5, max_new_tokens=128)
    assert list(result.answer.best) == [1, 4, 16]
    for size, chosen in result.answer.best.items():
        speeds = exhaustive(machine, [HEAD, COPIES], size)
        mine = speeds[chosen.configuration.source.name, chosen.configuration.length]
        assert mine >= 0.95 * max(speeds.values())


def test_it_says_not_to_speculate() -> None:
    """A pass that is bound by arithmetic: nothing pays."""
    machine = SimulatedMachine(
        {"the head": POOR}, {"the head": lambda rows: 0.01}, lambda rows, width: 0.01 * rows * width
    )
    result = tuned(machine, [HEAD])
    assert not result.answer.speculates
    assert result.answer.words() == (
        "Do not speculate: plain decoding is the fastest at batches 1, 4 and 16."
    )
    assert result.answer.overall is PLAIN
    assert result.answer.table(PLAIN).as_lists == [[1, 16, 0]]


def test_the_answer_in_plain_words() -> None:
    machine = SimulatedMachine(
        {"the head": GOOD, "prompt lookup": [0.5] * 8},
        {"the head": lambda rows: 0.001 + 0.004 * (rows - 1), "prompt lookup": lambda rows: 0.0},
        lambda rows, width: 0.02 + 0.002 * max(0, rows * width - 24),
        num_prompts=16,
    )
    result = tuned(machine, batch_sizes=(1, 4, 64), minutes=60)
    words = result.answer.words()
    assert words.startswith("Use the head with ")
    assert " up to batch 1, prompt lookup with " in words
    assert ", nothing above: " in words
    assert words.count("×") == 2
    table = result.answer.table(result.answer.overall)
    assert table.length(1) > 0
    assert table.length(64) == 0
    assert result.answer.source_at(1).name == "the head"
    assert result.answer.source_at(3).name == "prompt lookup"
    assert result.answer.source_at(1000) is PLAIN


# ----------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("minutes", [0.5, 1, 2, 5])
def test_the_budget_is_kept(minutes: float) -> None:
    """Whatever it is: the estimates of what work takes are from measured times. The rest of the
    time is used."""
    machine = two_sources(num_prompts=50)
    began = machine.now
    result = tuned(machine, minutes=minutes)
    assert result.seconds == pytest.approx(machine.now - began)
    assert result.seconds <= 60 * minutes
    assert result.answer is not None
    if minutes <= 1:
        assert result.left_out
    assert result.seconds > 0.2 * 60 * min(minutes, 5)


def test_without_time_for_trials_the_answer_is_a_prediction() -> None:
    slow = SimulatedMachine(
        {"the head": GOOD}, {"the head": lambda rows: 0.01}, lambda rows, width: 0.2 + 0.001 * rows
    )
    result = tuned(slow, [HEAD], minutes=4, batch_sizes=(1,), max_new_tokens=512)
    assert result.seconds <= 240
    assert "predicted, not measured" in result.answer.words()
    assert any("repeat 1" in each for each in result.left_out)


def test_too_short_a_budget_names_the_least() -> None:
    with pytest.raises(InvalidParameterError, match="too short to measure anything") as error:
        tuned(two_sources(), minutes=0.02)
    least = float(str(error.value).split("at least ")[1].split(" ")[0])
    assert 0.02 < least < 2
    assert tuned(two_sources(), minutes=1.05 * least).answer is not None


def test_too_short_a_budget_names_what_took_it_before() -> None:
    """Compiling, which is done the next time."""
    machine = two_sources()
    with pytest.raises(InvalidParameterError, match="too short to measure anything") as error:
        Tuner(machine, [HEAD], TuneSettings((1,), 5), began=machine.now - 775).run()
    assert "anything: loading and compiling took 13 minutes, and on this" in str(error.value)
    assert "at least 14 minutes; what was compiled is kept" in str(error.value)
    with pytest.raises(InvalidParameterError) as error:
        tuned(two_sources(), minutes=0.02)
    assert "compiling" not in str(error.value)


def test_the_time_before_the_tuner_counts() -> None:
    machine = two_sources()
    began = machine.now
    machine.now += 60  # loading the models
    result = Tuner(machine, [HEAD], TuneSettings((1,), 2), began=began).run()
    assert machine.now - began <= 120
    assert result.seconds > 60


def test_a_time_budget_notes_what_it_leaves_out() -> None:
    now = [0.0]
    budget = TimeBudget(10, lambda: now[0])
    assert budget.allows("this", 4, until=0.5)
    now[0] = 3
    assert not budget.allows("that", 4, until=0.5)
    assert budget.allows("those", 7)
    assert (budget.spent, budget.left, budget.left_out) == (3, 7, ["that"])


# -------------------------------------------------------------------------- errors and interruption


def test_a_source_that_fails_in_its_trials_is_not_chosen() -> None:
    """After the probes, such as one whose compilation fails."""
    machine = two_sources()
    probed = False

    def on_stage(stage: str, share: float) -> None:
        nonlocal probed
        if probed and stage.startswith("the head"):
            machine.broken = ["the head"]
        probed = probed or stage.startswith("the head, 2 tokens")

    result = Tuner(machine, [HEAD], TuneSettings((1,), 2), on_stage).run()
    assert set(result.trials.errors.values()) == {"the head does not fit the target"}
    assert not result.trials.repeats


def test_a_source_that_does_not_work_is_named_and_left_out() -> None:
    result = tuned(two_sources(broken=["the head"]))
    assert result.errors == {"the head": "the head does not fit the target"}
    assert result.answer.source_at(1).name == "prompt lookup"


def test_no_source_that_works() -> None:
    reasons = "no source of drafts works here: prompt lookup: .*; the head: "
    with pytest.raises(InvalidParameterError, match=reasons):
        tuned(two_sources(broken=["the head", "prompt lookup"]))


def test_compiling_a_draft_does_not_keep_copies_from_being_measured() -> None:
    """The programs of a draft model, which may take all of the time to compile, come last."""
    machine = two_sources()
    first_run = machine.run

    def run(source: Source, length: int, *rest: Any) -> Any:
        if source is HEAD and (source.name, length, 1) not in machine.runs:
            machine.now += 100
        return first_run(source, length, *rest)

    machine.run = run  # type: ignore[method-assign]
    result = tuned(machine, batch_sizes=(1,), minutes=4)
    assert set(result.acceptance) == {"the head", "prompt lookup"}


def test_interrupted_trials_keep_what_was_measured() -> None:
    whole = tuned(two_sources())
    machine = two_sources(interrupt_after=20)
    result = tuned(machine)
    assert result.interrupted
    assert not whole.interrupted
    assert result.answer.speculates
    assert result.as_dict()["interrupted"]
    assert sum(map(len, result.trials.repeats.values())) < sum(
        map(len, whole.trials.repeats.values())
    )


def test_an_interruption_before_anything_is_known_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        tuned(two_sources(interrupt_after=1))


def test_nothing_to_tune_on_or_to_choose_from() -> None:
    with pytest.raises(InvalidParameterError, match="there are no prompts to tune on"):
        tuned(two_sources(num_prompts=0))
    with pytest.raises(InvalidParameterError, match="there is nothing to choose from"):
        tuned(two_sources(), [])


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"minutes": 0}, "minutes=0: must be above 0"),
        ({"minutes": math.nan}, "minutes=nan"),
        ({"batch_sizes": ()}, "batch_sizes="),
        ({"batch_sizes": (4, 1)}, "ascending"),
        ({"batch_sizes": (0,)}, "whole numbers from 1"),
        ({"max_new_tokens": 8}, "must be 24 or more"),
    ],
)
def test_bad_settings(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=problem):
        TuneSettings(**values)


def test_the_same_seed_measures_the_same() -> None:
    """The machine draws with its own seed, so the order of all runs must be the same, too."""
    first, second = two_sources(), two_sources()
    assert tuned(first).as_dict() == tuned(second).as_dict()
    assert first.runs == second.runs
