"""Trials: a version that is accepted less is rolled back, and one that is accepted as often is not,
whatever the traffic does meanwhile."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from online_helpers import Watching, disturbed, sampled
from tiny_models import engine_of, ragged_prompts, tiny

from outrider.engine.round_counts import RoundCounts
from outrider.engine.round_observer import RowRound
from outrider.runtime.weights import plain_weights
from outrider.train.online.draft_model import DraftModelSubject
from outrider.train.online.trial import BLOCK_ROUNDS, Trial
from outrider.train.online.versions import Version, Versions

# ------------------------------------------------------------------------------------ trials


def failure(
    old: Callable[[int], float], new: Callable[[int], float], num: int, seed: int, δ: float
) -> int | None:
    """After how many rounds a trial fails, whose drafts are accepted with these probabilities."""
    rng = random.Random(seed)
    trial = Trial(δ, random.Random(seed + 10_000))
    for index in range(num):
        trial.begin_round()
        if trial.has_failed:
            return index
        chance = (new if trial.uses_new else old)(index)
        trial.add(float(rng.random() < chance))
    return None


def shifts(index: int) -> float:
    """Traffic that turns to another domain after 100 rounds, and to a third after 300."""
    return 0.9 if index < 100 else 0.2 if index < 300 else 0.6


def alternates(index: int) -> float:
    """Traffic in which blocks as long as those of the trial are easy and hard in turn."""
    return 0.95 if index // BLOCK_ROUNDS % 2 else 0.1


@pytest.mark.parametrize("chance", [lambda index: 0.6, shifts, alternates])
def test_false_alarms_are_rarer_than_stated(chance: Callable[[int], float]) -> None:
    """δ = 0.05 in 400 trials of 600 rounds: at most 20 false alarms are expected; 36 or more have a
    probability below 1e-3 for a correct test."""
    failed = [failure(chance, chance, 600, seed, 0.05) for seed in range(400)]
    assert sum(each is not None for each in failed) < 36


def test_a_fixed_order_of_the_blocks_would_raise_more() -> None:
    """Without the coin, traffic of the same rhythm looks like a fall every time."""

    class Always(random.Random):
        def random(self) -> float:
            return 0.0  # the new weights always come first, where the traffic is hard

    trial, rng = Trial(0.05, Always()), random.Random(0)
    for index in range(600):
        trial.begin_round()
        trial.add(float(rng.random() < alternates(index)))
    assert trial.has_failed


@pytest.mark.parametrize(("old", "new", "most"), [(0.7, 0.1, 200), (0.7, 0.4, 800)])
def test_falls_are_found(old: float, new: float, most: int) -> None:
    """Each of 40 falls is found within so many rounds of one row."""
    failed = [failure(lambda i: old, lambda i: new, most, seed, 0.01) for seed in range(40)]
    assert all(each is not None for each in failed)


def test_a_rise_never_fails() -> None:
    failed = [failure(lambda i: 0.4, lambda i: 0.6, 600, seed, 0.05) for seed in range(40)]
    assert failed == [None] * 40


def test_both_weights_draft_half_of_the_rounds_in_blocks() -> None:
    trial = Trial(0.01, random.Random(0))
    order = []
    for _ in range(800):
        trial.begin_round()
        order.append(trial.uses_new)
    assert sum(order) == 400
    blocks = [order[i : i + BLOCK_ROUNDS] for i in range(0, 800, BLOCK_ROUNDS)]
    assert all(len(set(block)) == 1 for block in blocks)
    firsts = [blocks[i][0] for i in range(0, len(blocks), 2)]
    assert 20 < sum(firsts) < 80, "a coin decides which comes first"


def test_rounds_without_a_draft_say_nothing() -> None:
    trial = Trial(0.5, random.Random(0))
    for _ in range(100):
        trial.begin_round()
        if trial.uses_new:
            trial.add(0.0)
    assert not trial.has_failed


# ---------------------------------------------------------------------------------- versions


def versions(trial_rounds: int = 8, false_alarm: float = 0.01) -> Versions:
    draft = tiny(name="draft")
    return Versions(
        DraftModelSubject(engine_of(tiny(), draft), draft),
        Version(0, 0),
        Path("0"),
        plain_weights(draft.module),
        trial_rounds=trial_rounds,
        false_alarm=false_alarm,
        rng=random.Random(0),
    )


def offer(made: Versions, number: int) -> None:
    weights = plain_weights(tiny(seed=number).module)
    made.propose(made.offer(Version(number, 10 * number), Path(str(number)), weights))


def first_weight(made: Versions) -> float:
    return float(next(made._subject._draft.module.parameters()).detach()[0, 0])


ENGINE = engine_of(tiny())
ROW = ENGINE._builder.row(ENGINE.request([1, 2]))


def drafted(accepted: bool) -> RowRound:
    """A round of one drafted token."""
    counts = RoundCounts(1, 1, not accepted, [1.0], [float(accepted)])
    return RowRound(ROW, 1, counts, int(accepted), 1 + accepted)


def run(made: Versions, num: int, accepts: Callable[[bool], bool]) -> list[str]:
    """Rounds, each accepted depending on whether other weights than the first draft; the changes
    that they bring."""
    changes = []
    original = WEIGHT_OF[0]
    for _ in range(num):
        if change := made.begin_round():
            changes.append(change)
        made.count(drafted(accepts(first_weight(made) != original)))
    return changes


WEIGHT_OF = {0: first_weight(versions())}


def test_a_version_takes_over_after_its_trial() -> None:
    made = versions()
    offer(made, 1)
    assert run(made, 8, lambda new: True) == []
    assert made.on_trial == 1
    assert made.serving.number == 0
    offer(made, 2)
    offer(made, 3)
    assert run(made, 1, lambda new: True) == ["taken over"]
    assert made.serving.number == 1
    assert made.on_trial == 3, "the newest of those that wait"
    assert run(made, 8, lambda new: True) == ["taken over"]
    assert [(v.number, v.status) for v in made.all] == [
        (0, "replaced"),
        (1, "replaced"),
        (3, "serving"),
    ]
    assert made.serving.alpha_before == 1


def test_without_trials_a_version_serves_at_once() -> None:
    made = versions(trial_rounds=0)
    for number in (1, 2):
        offer(made, number)
        assert made.settle() == "taken over"
    assert made.serving.number == 2
    assert first_weight(made) != WEIGHT_OF[0]


def test_a_version_that_is_accepted_less_is_rolled_back() -> None:
    made = versions(trial_rounds=1000)
    offer(made, 1)
    assert run(made, 200, lambda new: not new) == ["rolled back"]
    assert first_weight(made) == WEIGHT_OF[0]
    assert [(v.number, v.status) for v in made.all] == [(1, "rolled back"), (0, "serving")]
    assert made.all[0].alpha == 0
    assert made.all[0].alpha_before == 1
    assert made.path == Path("0")


def test_what_came_of_a_failed_version_is_not_tried() -> None:
    made = versions(trial_rounds=1000)
    offer(made, 1)
    run(made, 4, lambda new: not new)
    offer(made, 2)
    assert run(made, 200, lambda new: not new) == ["rolled back"]
    assert made.on_trial is None
    assert made.needed == [Path("0")]


def test_a_trial_that_is_broken_off_leaves_the_serving_weights() -> None:
    made = versions()
    offer(made, 1)
    while first_weight(made) == WEIGHT_OF[0]:
        run(made, 1, lambda new: True)
    made.close()
    assert first_weight(made) == WEIGHT_OF[0]
    assert made.on_trial is None


def test_drafts_verified_by_the_argmax_count_by_what_was_accepted() -> None:
    """Their counts have no overlap at all where the first token was rejected."""
    made = versions()
    offer(made, 1)
    made.begin_round()
    made.count(RowRound(ROW, 1, RoundCounts(3, 3, True, [1.0], []), 0, 1))
    made.count(RowRound(ROW, 1, RoundCounts(3, 3, True, [1.0, 1.0], [1.0]), 1, 2))
    assert made._challenger is not None
    assert sorted(x for block in made._challenger[1]._values.values() for x in block) == [0.0, 1.0]


def test_alpha_is_that_of_the_statistics() -> None:
    """Over the same rounds, the serving version's α is ``result.stats.alpha``."""
    target = tiny()
    engine = engine_of(target, disturbed(target))
    made = versions()

    class Counting(Watching):
        def read(self, done, line):  # type: ignore[no-untyped-def]
            made.count(done)

    engine.observed.observer = Counting()
    stats = engine.generate(ragged_prompts([9, 4, 2]), sampled(40)).stats
    assert made.serving.alpha == pytest.approx(stats.alpha)
    assert made.serving.rounds == stats.rounds
