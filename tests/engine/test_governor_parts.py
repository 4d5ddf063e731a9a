"""The governor's parts: costs, acceptance and goodput, each against its definition."""

import itertools
import math
import random
from operator import mul

import pytest

from outrider.engine.governor.acceptance import PositionRates, odds_against, probability
from outrider.engine.governor.allocation import expected_tokens
from outrider.engine.governor.catch_up import CatchUp
from outrider.engine.governor.costs import RoundCosts, monotone
from outrider.engine.governor.counts import Counts
from outrider.engine.governor.governor import Governor
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.governor.row_rates import Factor, RowRates
from outrider.engine.governor.saved_times import RoundTime
from outrider.engine.governor.sources import Sources, draft_lengths
from outrider.engine.governor.spread import Evidence, Spread
from outrider.engine.governor.surface import HALF_LIFE, Surface, interpolated

# ------------------------------------------------------------------------------------ allocation


@pytest.mark.parametrize("seed", range(20))
def test_the_best_length_is_the_best_of_all_ways_to_share_tokens_out(seed: int) -> None:
    """Brute force over every vector of draft lengths. A round costs what its widest row costs."""
    drawn = random.Random(seed)
    limits = [drawn.randint(0, 4) for _ in range(3)]
    survivals = [
        list(itertools.accumulate((drawn.random() for _ in range(n)), lambda s, p: s * p))
        for n in limits
    ]
    most = max(limits)
    seconds = list(itertools.accumulate(drawn.uniform(0.01, 0.5) for _ in range(most + 1)))

    def rate(lengths: tuple[int, ...]) -> float:
        pairs = zip(survivals, lengths, strict=True)
        tokens = len(limits) + sum(sum(survival[:length]) for survival, length in pairs)
        return tokens / seconds[max(lengths)]

    tokens = expected_tokens(survivals, len(limits), range(most + 1))
    found = [n / cost for n, cost in zip(tokens, seconds, strict=True)]
    every = itertools.product(*(range(limit + 1) for limit in limits))
    assert max(found) == pytest.approx(max(map(rate, every)), rel=1e-12)


def test_lengths_that_are_left_out_change_nothing_about_the_others() -> None:
    survivals = [[0.9, 0.8, 0.7], [0.5]]
    every = expected_tokens(survivals, 2, [0, 1, 2, 3])
    assert expected_tokens(survivals, 2, [0, 2, 3]) == [every[0], every[2], every[3]]
    assert every == pytest.approx([2.0, 3.4, 4.2, 4.9])


def test_lengths_to_choose_from_end_with_the_longest() -> None:
    assert draft_lengths(3) == (0, 1, 2, 3)
    assert draft_lengths(20) == (0, 1, 2, 3, 5, 8, 13, 20)


# ----------------------------------------------------------------------------------------- costs


def test_monotone_is_the_nearest_sequence_that_does_not_decrease() -> None:
    assert monotone([1.0, 3.0, 2.0, 5.0], [1.0] * 4) == [1.0, 2.5, 2.5, 5.0]
    assert monotone([1.0, 3.0, 2.0], [1.0, 3.0, 1.0]) == [1.0, 2.75, 2.75]
    assert monotone([3.0, 2.0, 1.0], [1.0] * 3) == [2.0] * 3


def test_interpolation_is_linear_between_and_constant_beyond() -> None:
    assert [interpolated([1, 3], [10.0, 20.0], at) for at in (0, 1, 2, 3, 9)] == [
        10,
        10,
        15,
        20,
        20,
    ]
    assert interpolated([], [], 4) == 0.0


def test_a_surface_finds_a_line_in_the_number_of_tokens() -> None:
    """Also for numbers of rows that were never measured."""
    surface = Surface(lambda rows, length: rows * (length + 1), 0.03)
    for now, (rows, length) in enumerate(itertools.product((1, 4, 8), (0, 2, 5))):
        for _ in range(8):
            surface.observe(rows, length, 2.0 + 0.25 * rows * (length + 1), now)
    seconds, _ = surface.read(6, [0, 3], 10)
    assert seconds == pytest.approx([3.5, 8.0], rel=0.02)


def test_measured_cells_outweigh_the_line() -> None:
    """One length is slower than a line says, as where a program is missing for it."""
    surface = Surface(lambda rows, length: length + 1, 0.03)
    times = {0: 1.0, 1: 1.1, 2: 3.0, 3: 1.3, 4: 1.4}
    for now in range(40):
        surface.observe(1, now % 5, times[now % 5], now)
    seconds, _ = surface.read(1, list(times), 40)
    assert seconds == pytest.approx(list(times.values()), rel=0.1)


def test_a_stale_cell_yields_to_a_new_measurement() -> None:
    fresh, stale = (Surface(lambda rows, length: length + 1, 0.0) for _ in range(2))
    for now in range(32):
        fresh.observe(1, 1, 1.0, now)
        stale.observe(1, 1, 1.0, now)
    fresh.observe(1, 1, 1.5, 32)
    stale.observe(1, 1, 1.5, 32 + 8 * HALF_LIFE)
    assert fresh.read(1, [1], 32)[0][0] < 1.05
    assert stale.read(1, [1], 32 + 8 * HALF_LIFE)[0][0] > 1.4


def test_one_delayed_round_moves_a_mean_little_wherever_it_comes() -> None:
    for place in (0, 5):
        surface = Surface(lambda rows, length: length + 1, 0.0)
        for now in range(10):
            surface.observe(1, 0, 100.0 if now == place else 1.0, now)
        assert surface.read(1, [0], 10)[0][0] < 1.2


def test_costs_of_a_round_add_up() -> None:
    costs = RoundCosts(0.5)
    for _ in range(30):
        for length in (0, 1, 3):
            costs.observe(2, length, 0.2 * length, 1.0 + 0.1 * (length + 1) + 0.2 * length)
    assert costs.curve(2, (0, 1, 2, 3)) == pytest.approx([1.1, 1.4, 1.7, 2.0], rel=0.05)


def test_a_round_after_rounds_without_drafts_is_no_measure_of_many_drafts() -> None:
    """It takes longer, as a single probe does, since the caches have lost the draft model."""
    lengths = 0, 1, 3
    costs = RoundCosts(0.2)
    for length, seconds in ((0, 1.3), (1, 1.7), (3, 2.3)):
        costs.assume(1, length, 0.2 * length, seconds)
    before = costs.curve(1, lengths)
    for _ in range(20):
        costs.observe(1, 0, 0.0, 1.3)
        costs.observe(1, 1, 0.5, 2.4, changes=True)
    assert costs.curve(1, lengths) == pytest.approx(before, rel=0.05)
    for _ in range(20):
        costs.observe(1, 1, 0.5, 2.4)
    assert costs.curve(1, lengths)[1] > 2.2
    for _ in range(20):
        costs.observe(1, 3, 0.3, 1.8, changes=True)
    assert costs.curve(1, lengths)[2] < 2.5  # a bound from above is taken


def test_rounds_without_drafts_that_are_learned_together_weigh_as_if_one_by_one() -> None:
    together, apart = RoundCosts(0.2), RoundCosts(0.2)
    for costs in (together, apart):
        costs.assume(1, 0, 0.0, 2.0)
    together.observe_plain(1, [1.5] * 4)
    for _ in range(4):
        apart.observe(1, 0, 0.0, 1.5)
    assert together.now == apart.now
    assert together.curve(1, (0,)) == pytest.approx(apart.curve(1, (0,)), rel=0.01)


@pytest.mark.parametrize("after", [0.4, 0.8, 1.2, 2.5])
@pytest.mark.parametrize("before", [8, 0], ids=["measured before", "assumed alone"])
def test_what_slows_the_machine_slows_all_lengths(before: int, after: float) -> None:
    """Other work, a longer context, or times that were saved by a slower machine: of rounds that
    were not run meanwhile, too."""
    costs, lengths = RoundCosts(0.2), (0, 3)
    for length, seconds in ((0, 1.0), (3, 2.0)):
        costs.assume(1, length, 0.1 * length, seconds)
    for _ in range(before):
        costs.observe_plain(1, [1.0] * 8)
    plain, drafting = costs.curve(1, lengths)
    for _ in range(12):
        costs.observe_plain(1, [after] * 8)
    assert costs.curve(1, lengths) == pytest.approx([after * plain, after * drafting], rel=0.03)


def test_rounds_of_a_length_that_are_run_alone_slow_all_lengths() -> None:
    costs, lengths = RoundCosts(0.2), (0, 3)
    for length, seconds in ((0, 1.0), (3, 2.0)):
        costs.assume(1, length, 0.1 * length, seconds)
    plain, drafting = costs.curve(1, lengths)
    for _ in range(40):
        costs.observe(1, 3, 0.6, 4.0)
    assert costs.curve(1, lengths) == pytest.approx([2 * plain, 2 * drafting], rel=0.03)


def test_the_length_that_other_rows_begin_with_slows_all_lengths() -> None:
    """Their contexts are longer. The first rounds show it, whatever the length."""
    costs, lengths = RoundCosts(0.2), (0, 3)
    for _ in range(12):
        for length, seconds in ((0, 1.0), (3, 2.0)):
            costs.observe(1, length, 0.1 * length, seconds)
    plain, drafting = costs.curve(1, lengths)
    costs.change_rows()
    for rounds, error in ((4, 0.08), (36, 0.01)):
        for _ in range(rounds):
            costs.observe(1, 3, 0.45, 3.0)
        assert costs.curve(1, lengths) == pytest.approx([1.5 * plain, 1.5 * drafting], rel=error)


def test_a_second_length_of_other_rows_is_told_apart_from_the_first() -> None:
    costs, lengths = RoundCosts(0.2), (0, 3)
    for length, seconds in ((0, 1.0), (3, 3.0)):
        costs.assume(1, length, 0.1 * length, seconds)
    costs.change_rows()
    for _ in range(20):
        for length, seconds in ((0, 1.0), (3, 2.0)):
            costs.observe(1, length, 0.1 * length, seconds)
    plain, drafting = costs.curve(1, lengths)
    assert drafting / plain == pytest.approx(2.0, rel=0.1)


def test_rounds_that_do_not_tell_the_pace_tell_what_their_length_costs() -> None:
    """A draft model that read what it lacked makes a round slow, and the machine no slower."""
    costs = RoundCosts(0.2)
    costs.assume(1, 2, 0.2, 4.0)
    for _ in range(40):
        costs.observe(1, 2, 1.2, 3.2, behind=100)
    assert costs.curve(1, (2,))[0] == pytest.approx(2.2, rel=0.05)


def test_lengths_that_are_run_in_turn_are_told_apart() -> None:
    """One of them takes half as long as was assumed."""
    costs = RoundCosts(0.2)
    for length in (0, 3):
        costs.assume(1, length, 0.1 * length, 1.0 + length)
    for _ in range(8):
        for length, seconds in ((0, 1.0), (3, 2.0)):
            for _ in range(4):
                costs.observe(1, length, 0.05 * length, seconds)
    plain, drafting = costs.curve(1, (0, 3))
    assert drafting / plain == pytest.approx(2.0, rel=0.1)


def test_a_long_stretch_of_slow_rounds_is_no_more_than_some() -> None:
    costs = RoundCosts(0.2)
    for _ in range(8):
        costs.observe_plain(1, [1.0] * 8)
    costs.observe_plain(1, [1.2] * 64)
    assert costs.curve(1, (0,))[0] == pytest.approx(1.1, abs=0.03)


def test_a_delayed_first_round_of_a_length_is_no_measure_of_it() -> None:
    costs = RoundCosts(0.2)
    for _ in range(10):
        costs.observe(1, 0, 0.0, 1.0)
    costs.observe(1, 1, 0.2, 100.0)
    assert costs.curve(1, (0, 1))[1] < 3.0


def test_a_round_without_drafts_after_drafts_is_no_measure_of_many() -> None:
    """Its weights are not in the processor's caches."""
    costs = RoundCosts(0.2)
    costs.assume(1, 0, 0.0, 1.0)
    costs.assume(1, 2, 0.2, 1.5)
    for _ in range(20):
        costs.observe(1, 2, 0.2, 1.5)
        costs.observe(1, 0, 0.0, 1.3, changes=True)
    assert costs.curve(1, (0, 2)) == pytest.approx([1.0, 1.5], rel=0.02)


def test_a_delayed_round_among_rounds_without_drafts_changes_nothing() -> None:
    costs = RoundCosts(0.2)
    costs.assume(1, 0, 0.0, 1.5)
    costs.observe_plain(1, [1.5, 1.5, 90.0, 1.5, 1.5])
    assert costs.curve(1, (0,)) == pytest.approx([1.5])


def test_a_draft_model_that_was_never_used_costs_what_its_size_says() -> None:
    costs = RoundCosts(0.25)
    for _ in range(5):
        costs.observe(1, 0, 0.0, 2.0)
    plain, drafted = costs.curve(1, (0, 4))
    assert drafted - plain == pytest.approx(4 * 0.25 * 2.0, rel=0.35)  # and a wider target pass


def test_times_stay_above_zero_wherever_they_are_extrapolated() -> None:
    """Steep times of large batches, read for small ones."""
    costs = RoundCosts(0.1)
    for rows, length, seconds in ((8, 0, 1.0), (8, 8, 30.0), (16, 8, 90.0), (2, 4, 0.5)):
        for _ in range(4):
            costs.observe(rows, length, 0.0, seconds)
    for rows in range(1, 20):
        assert min(costs.curve(rows, tuple(range(9)))) > 0.1


def test_catching_up_is_no_part_of_a_draft_step() -> None:
    costs = RoundCosts(0.1)
    for _ in range(10):
        costs.observe(1, 2, 0.2, 1.2)
    before = costs.curve(1, (0, 2))
    for _ in range(10):
        costs.observe(1, 2, 0.2 + 0.01 * 100, 2.2, behind=100)
    assert costs.curve(1, (0, 2)) == pytest.approx(before, rel=0.02)
    assert costs.catch_up(1, 50) == pytest.approx(0.5, rel=0.2)


def test_tokens_of_all_rows_are_read() -> None:
    """Where passes are bound by computation, what four rows took says what one takes."""
    costs = RoundCosts(0.1)
    for rows in (1, 4):
        costs.assume(rows, 1, 0.1 * rows, 1.0 + rows)
    for _ in range(8):
        costs.observe_reading(4, 20, 8.0)
    assert costs.catch_up(4, 20) == pytest.approx(8.0, rel=0.1)
    assert costs.catch_up(1, 20) == pytest.approx(2.0, rel=0.2)


def test_reading_what_is_missing_takes_a_level_and_a_slope() -> None:
    reading = CatchUp()
    assert reading.steps(64) == pytest.approx(1.2)
    reading.assume(6.4)
    assert reading.steps(64) == pytest.approx(6.4)
    for tokens in (4, 60) * 8:
        reading.observe(tokens, 1.5 + 0.04 * tokens)
    for tokens in (2, 30, 200):
        assert reading.steps(tokens) == pytest.approx(1.5 + 0.04 * tokens, rel=0.15)


def test_a_slow_first_step_is_no_cost_of_each_missing_token() -> None:
    """A few tokens that were missing say little of many."""
    reading = CatchUp()
    for _ in range(10):
        reading.observe(5, 2.0)
    assert reading.steps(5) == pytest.approx(2.0, rel=0.1)
    assert reading.steps(60) < 10
    assert reading.steps(0) >= 0


# ------------------------------------------------------------------------------------ acceptance


def accepted_of(length: int, p: list[float], drawn: random.Random) -> int:
    return next((k for k in range(length) if drawn.random() >= p[k]), length)


def test_a_class_learns_the_acceptance_of_each_position() -> None:
    """8 rows and 400 rounds. The discount leaves about 130 labels of the first position, whose
    standard error is 0.04, and fewer further on; the tolerance is four of them."""
    p, drawn, rates = [0.9, 0.7, 0.5], random.Random(1), PositionRates()
    for now in range(400):
        rates.learn([Counts.of(3, accepted_of(3, p, drawn)) for _ in range(8)], now)
    assert list(map(probability, rates.odds(3))) == pytest.approx(p, abs=0.18)


def test_expected_counts_have_the_means_of_what_is_accepted() -> None:
    """The mean over drafts, by position, of a class whose r_i are drawn anew for each. The standard
    errors of 20,000 drafts are below 0.004; the tolerance is five of them."""
    drawn, num = random.Random(5), 20_000
    sums = {name: [[0.0] * 3, [0.0] * 3] for name in ("counted", "expected")}
    for _ in range(num):
        ratios = [drawn.random() ** 0.5 for _ in range(3)]
        accepted = accepted_of(3, ratios, drawn)
        overlap = list(itertools.accumulate(ratios, mul))
        for name, draft in (
            ("counted", Counts.of(3, accepted)),
            ("expected", Counts.expected(3, [1.0, *overlap[:-1]], overlap)),
        ):
            for side, numbers in zip(sums[name], draft, strict=True):
                for k, number in enumerate(numbers):
                    side[k] += number / num
    for counted, expected in zip(*sums.values(), strict=True):
        assert expected == pytest.approx(counted, abs=0.02)


def test_expected_counts_of_a_draft_that_ends_early() -> None:
    """What was asked for and not drafted counts as rejected, if the draft was accepted so far."""
    assert Counts.expected(3, [1.0, 0.5, 0.0], [0.5, 0.25, 0.0]) == (
        [1.0, 0.5, 0.25],
        [0.5, 0.25, 0],
    )
    assert Counts.expected(2, [], []) == ([1.0], [0.0])
    assert Counts.expected(1, [1.0, 0.5], [0.5, 0.25]) == ([1.0], [0.5])
    assert Counts.expected(2, [1.0, 0.0], [0.0, 0.0]) == ([1.0, 0.0], [0.0, 0.0])


def test_a_position_without_labels_is_like_the_one_before_it() -> None:
    rates = PositionRates()
    for now in range(50):
        rates.learn([Counts.of(2, 2)], now)
    two = rates.odds(5)
    assert two[2] == two[3] == two[4] == pytest.approx(two[1])
    assert probability(two[1]) > 0.9


def test_first_labels_say_less_than_later_ones() -> None:
    rates = PositionRates()
    rates.learn([Counts.of(1, 0)], 1)
    assert probability(rates.odds(1)[0]) > 0.5  # 0.6 was assumed
    for now in range(2, 20):
        rates.learn([Counts.of(1, 0)], now)
    assert probability(rates.odds(1)[0]) < 0.15


def test_counts_of_large_batches_weigh_as_those_of_single_rows_would() -> None:
    """Once a single row drafts: as many labels are left as single rows would have given."""
    large, single = PositionRates(), PositionRates()
    for now in range(400):
        large.learn([Counts.of(2, 2)] * 32, now)
        single.learn([Counts.of(2, 2)], now)
    for each in (large, single):
        each.learn([Counts.of(2, 0)], 400)
    assert large.odds(2) == pytest.approx(single.odds(2), rel=0.05)
    large.review([1.0] * 8, 410)
    single.review([1.0] * 8, 410)
    assert large.odds(2) == pytest.approx(single.odds(2), rel=0.05)


def test_a_round_that_drafts_nothing_teaches_nothing() -> None:
    rates = PositionRates()
    rates.learn([Counts.of(2, 1)], 1)
    before = rates.odds(2)
    rates.learn([Counts.of(0, 0)], 50)
    assert rates.odds(2) == before


def test_rows_differ_from_their_class_as_their_labels_do() -> None:
    drawn, rows = random.Random(2), {0.9: RowRates(), 0.3: RowRates()}
    of_class = [odds_against(0.6)] * 3
    for now in range(60):
        for p, row in rows.items():
            row.learn(of_class, Counts.of(3, accepted_of(3, [p] * 3, drawn)), now, Spread())
    first = {p: row.survival(of_class)[0] for p, row in rows.items()}
    assert first[0.9] > 0.75
    assert first[0.3] < 0.45


def test_predictions_of_rows_are_calibrated() -> None:
    """Rows whose acceptances are spread evenly: in each bin, predicted and observed frequencies
    agree. Each bin has over 300 labels, so 0.1 is more than three standard errors."""
    drawn = random.Random(3)
    truth = [drawn.uniform(0.2, 0.95) for _ in range(40)]
    of_class, rows = PositionRates(), [RowRates() for _ in truth]
    bins: dict[int, list[tuple[float, bool]]] = {}
    for now in range(200):
        odds, outcomes = of_class.odds(1), []
        for p, row in zip(truth, rows, strict=True):
            predicted, hit = row.survival(odds)[0], drawn.random() < p
            if now >= 40:
                bins.setdefault(int(5 * predicted), []).append((predicted, hit))
            draft = Counts.of(1, int(hit))
            row.learn(odds, draft, now, of_class.spread)
            outcomes.append(draft)
        of_class.learn(outcomes, now)
    assert len(bins) >= 4
    for pairs in bins.values():
        if len(pairs) > 300:
            predicted = sum(p for p, _ in pairs) / len(pairs)
            observed = sum(hit for _, hit in pairs) / len(pairs)
            assert predicted == pytest.approx(observed, abs=0.1)


def test_a_few_rejections_are_taken_for_chance() -> None:
    """After ten rounds with half of the acceptance a row is still believed to be much like its
    class, which has seen many."""
    of_class, row = [odds_against(0.6)], RowRates()
    for now in range(10):
        row.learn(of_class, Counts((1.0,), (0.3,)), now, Spread())
    assert 0.45 < row.survival(of_class)[0] < 0.58


@pytest.mark.parametrize(("before", "after"), [(0.85, 0.1), (0.1, 0.85)])
def test_a_text_that_changes_is_noticed_within_eight_rounds(before: float, after: float) -> None:
    """Of a class that has not changed, in rounds that verify two tokens each."""
    of_class, row = [odds_against(before)] * 2, RowRates()
    for now in range(100):
        row.learn(of_class, Counts((1.0, 1.0), (before, before)), now, Spread())
    assert row.survival(of_class)[0] == pytest.approx(before, abs=0.01)
    for now in range(100, 108):
        row.learn(of_class, Counts((1.0, 1.0), (after, after)), now, Spread())
    assert row.survival(of_class)[0] == pytest.approx(after, abs=0.25)


def test_estimates_are_weighed_by_their_posterior_probabilities() -> None:
    """Brute force over all sequences of which estimate is the better one, which changes with
    probability 0.01 per round and is the recent one with probability 0.1 at first."""
    drawn, row, odds = random.Random(5), RowRates(), odds_against(0.6)
    estimates, likelihoods = (Factor(0.95), Factor(0.75)), []
    spread, of_class, evidence = Spread(), Spread(), Evidence()
    for now in range(6):
        hits = drawn.randint(0, 3)
        of_class.learn(evidence, hits, 3, 1.8)
        predicted = [probability(odds * each.value) for each in estimates]
        likelihoods.append([p**hits * (1 - p) ** (3 - hits) for p in predicted])
        for each, strength in zip(estimates, (of_class.strength(0.6), 2.0), strict=True):
            each.learn(hits, 3, 1.8, 1, strength)
        draft = Counts((1.0,) * 3, tuple(float(k < hits) for k in range(3)))
        row.learn([odds] * 3, draft, now + 1, spread)
    total = [0.0, 0.0]
    for states in itertools.product((0, 1), repeat=7):
        weight = (0.9, 0.1)[states[0]]
        for likelihood, state, following in zip(likelihoods, states, states[1:], strict=False):
            weight *= likelihood[state] * (0.99 if state == following else 0.01)
        total[states[-1]] += weight
    share = total[1] / sum(total)
    first, second = (probability(odds * each.value) for each in estimates)
    wanted = (1 - share) * first + share * second
    assert row.survival([odds])[0] == pytest.approx(wanted, abs=1e-9)


def test_a_row_that_was_given_up_is_like_its_class_again_in_time() -> None:
    odds, row = [1.0, 1.0], RowRates()
    for now in range(8):
        row.learn(odds, Counts.of(2, 0), now, Spread())
    survivals = [row.survival(odds, 7 + pause)[0] for pause in (0, 10, 40, 400)]
    assert survivals == sorted(survivals)
    assert survivals[0] == row.survival(odds)[0] < 0.35
    assert survivals[-1] == pytest.approx(0.5, abs=0.001)


@pytest.mark.parametrize("lags", [False, True])
def test_promises_of_a_row_go_back_to_those_of_its_class(lags: bool) -> None:
    """Also of draft models with a cache of their own, for which reviews may be too dear."""
    governor, row = Governor(Sources(lags=lags)), RowMemory(True)
    governor.assume([RoundTime(True, 1, length, 0.1 * length, 1.0) for length in (0, 1)])
    for now in range(8):
        row.of(0).learn([1.0], Counts.of(1, 0), now, Spread())
    tokens = []
    for governor.now in (8, 100):
        promise = governor.promise(0, [row], [1], True, (0, 1))
        tokens.append(promise.option(1).believed.tokens)  # type: ignore[union-attr]
    assert tokens[1] > tokens[0] + 0.05


def test_new_labels_outweigh_old_ones_after_a_pause() -> None:
    paused, busy = RowRates(), RowRates()
    of_class = [odds_against(0.5)]
    for row in (paused, busy):
        for now in range(40):
            row.learn(of_class, Counts.of(1, 0), now, Spread())
    for step in range(3):
        busy.learn(of_class, Counts.of(1, 1), 40 + step, Spread())
        paused.learn(of_class, Counts.of(1, 1), 140 + step, Spread())
    assert paused.survival(of_class)[0] > busy.survival(of_class)[0] + 0.15


def test_odds_stay_finite() -> None:
    assert 0 < odds_against(1.0) < odds_against(0.5) == 1.0 < odds_against(0.0) < math.inf
