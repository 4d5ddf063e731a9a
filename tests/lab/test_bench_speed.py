"""Ratios with intervals, latencies and acceptance on measurements whose answer is known."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_bench import repeat, request, ticking
from tiny_models import byte_tokenizer

from outrider.lab.bench import BatchRecord, Repeat, speedup
from outrider.lab.bench.measuring_share import MOST, measuring_share, seconds_per_note
from outrider.lab.bench.ratio import distance, is_steady
from outrider.lab.bench.speed import percentiles, speed_of
from outrider.lab.bench.token_classes import TokenClasses, acceptance_by_class
from outrider.lab.data import Example

# -------------------------------------------------------------------------- cost of measuring


def test_a_note_takes_what_the_clock_says() -> None:
    """A clock that goes on by a microsecond at each reading: a note reads it once."""
    assert seconds_per_note(ticking(1e-6)) == pytest.approx(1e-6, rel=0.01)


def test_the_share_of_measuring_counts_every_round_and_batch() -> None:
    """Two batches of a request with two rounds each, of 4 seconds together: 2 * (2 + 2) notes."""
    batch = BatchRecord(2.0, (request(ends=(1.0, 2.0), tokens=(1, 1)),))
    measured = Repeat("", 0, 0, "", (batch, batch))
    assert measuring_share([measured], 0.001) == pytest.approx(8 * 0.001 / 4)
    assert measuring_share([measured, measured], 0.001) == pytest.approx(8 * 0.001 / 4)


@pytest.mark.parametrize(("reading", "cheap"), [(2e-6, True), (2e-5, False)])
def test_measuring_rounds_of_a_millisecond(reading: float, cheap: bool) -> None:
    """Eight rounds take ten notes, each of which reads the clock once: with a clock that takes 2
    microseconds, 0.25 % of the time; with one that takes 20, more than the 1 % that it may."""
    batch = BatchRecord(8e-3, (request(ends=(1.0,) * 8, tokens=(1,) * 8),))
    share = measuring_share([Repeat("", 0, 0, "", (batch,))], seconds_per_note(ticking(reading)))
    assert share == pytest.approx(10 * reading / 8e-3, rel=0.01)
    assert (share < MOST) is cheap


# ------------------------------------------------------------------------------------- ratios


def test_a_constant_ratio_has_an_interval_of_no_width() -> None:
    """The machine and the prompts vary by factors of 10, and the ratio does not."""
    base = [repeat(r, *((s * 10**r, 8) for s in (1.0, 3.0, 0.2))) for r in range(3)]
    fast = [repeat(r, *((s * 10**r, 16) for s in (1.0, 3.0, 0.2))) for r in range(3)]
    found = speedup(fast, base)
    assert found is not None
    for part in (found, found["per_prompt"]):
        assert part["ratio"] == pytest.approx(2.0, rel=1e-12)
        assert part["low"] == pytest.approx(2.0, rel=1e-12)
        assert part["high"] == pytest.approx(2.0, rel=1e-12)
    assert found["repeats"] == pytest.approx([2.0] * 3)
    assert found["steady"]


def test_total_and_per_prompt_ratios_differ_as_defined() -> None:
    found = speedup([repeat(0, (1.0, 40), (1.0, 10))], [repeat(0, (1.0, 10), (4.0, 40))])
    assert found is not None
    assert found["ratio"] == pytest.approx((50 / 2) / (50 / 5))
    assert found["per_prompt"]["ratio"] == pytest.approx((40 + 10) / (10 + 10))


def test_intervals_cover_the_true_ratio() -> None:
    """The true ratio is 1.5. With 95 % intervals, a correct one misses in at most about 5 % of 200
    experiments; the two-way bootstrap is conservative. Missing 24 or more of 200 has a probability
    below 1e-4 at 5 %, and covering always would need an interval that is too wide: the mean width
    is compared with the width of the true distribution of the estimate."""
    random_ = random.Random(0)
    missed, widths, estimates = 0, [], []
    for _ in range(200):
        base, fast = [], []
        for r in range(8):
            load = random_.lognormvariate(0, 0.3)  # of the machine, for both
            times = [load * random_.lognormvariate(0, 0.1) for _ in range(2 * 30)]
            base.append(repeat(r, *((1.5 * t, 10) for t in times[:30])))
            fast.append(repeat(r, *((t, 10) for t in times[30:])))
        found = speedup(fast, base, draws=300)
        assert found is not None
        missed += not found["low"] <= 1.5 <= found["high"]
        widths.append(found["high"] - found["low"])
        estimates.append(found["ratio"])
    assert missed < 24
    mean = sum(estimates) / 200
    deviation = (sum((each - mean) ** 2 for each in estimates) / 199) ** 0.5
    assert 2 * 1.96 * deviation < sum(widths) / 200 * 1.1
    assert sum(widths) / 200 < 4 * 1.96 * deviation


def test_unpaired_measurements_would_not_see_the_shared_load() -> None:
    """A mutant: pairing repeat r with another repeat. The interval then contains the load."""
    base = [repeat(r, *((10.0**r, 8) for _ in range(5))) for r in range(4)]
    fast = [repeat(r, *((10.0**r, 12) for _ in range(5))) for r in range(4)]
    paired = speedup(fast, base)
    shuffled = [Repeat("", (r.number + 1) % 4, 0, "", r.batches) for r in base]
    unpaired = speedup(fast, shuffled)
    assert paired is not None
    assert unpaired is not None
    assert paired["high"] - paired["low"] < 1e-9
    assert unpaired["high"] - unpaired["low"] > 0.5


def test_only_common_repeats_count() -> None:
    found = speedup([repeat(1, (1.0, 30))], [repeat(0, (1.0, 1)), repeat(1, (1.0, 10))])
    assert found is not None
    assert found["ratio"] == pytest.approx(3.0)
    assert speedup([repeat(0, (1.0, 1))], [repeat(1, (1.0, 1))]) is None


def test_repeats_of_one_session_are_compared() -> None:
    """The machine of the earlier session was half as fast."""
    early = replace(repeat(0, (2.0, 10)), session="early")
    late = [replace(repeat(r, (1.0, 10)), session="late") for r in range(3)]
    fast = [replace(repeat(r, (1.0, 20)), session="late") for r in range(3)]
    found = speedup(fast, [early, *late[1:]])
    assert found is not None
    assert (found["ratio"], found["repeats"], found["steady"]) == (2.0, [2.0, 2.0], True)
    one = speedup(fast[:2], [early, *late[1:]])
    assert one is not None
    assert (one["repeats"], one["steady"]) == ([2.0], False)
    alone = speedup(fast[:1], [early])
    assert alone is not None
    assert (alone["ratio"], alone["steady"]) == (4.0, False)


def test_steadiness() -> None:
    assert is_steady([1.0, 1.05], [1.025] * 4)
    assert not is_steady([1.06, 1.0], [1.03] * 4)
    assert is_steady([2.0], [2.0])
    runs = [repeat(r, (1.0, 10 + r % 2)) for r in range(4)]
    found = speedup(runs, [repeat(r, (1.0, 10)) for r in range(4)])
    assert found is not None
    assert found["halves"] == pytest.approx([1.0, 1.1])
    assert not found["steady"]


def test_halves_that_agree_by_chance_are_not_steady() -> None:
    """Repeats of 1 and 1.5 in turn, of which each half has as many: another run may be further."""
    ratios = [1.0, 1.0, 1.5, 1.5] * 2
    runs = [repeat(r, (1.0, int(20 * ratio))) for r, ratio in enumerate(ratios)]
    found = speedup(runs, [repeat(r, (1.0, 20)) for r in range(8)])
    assert found is not None
    assert found["halves"] == pytest.approx([1.25, 1.25])
    assert not found["steady"]
    assert found["distance"] == pytest.approx(distance(ratios))


def test_two_runs_are_as_far_apart_as_expected() -> None:
    """Of 2000 pairs of runs, 95 % are within the distance of their spread: false alarm below 1e-6
    for a share outside 92 to 98 %, whose standard error is half a per cent."""
    generator = np.random.default_rng(0)
    logs_RS = generator.normal(0, 0.1, (2, 50, 2000))
    first_S, second_S = logs_RS.mean(1)
    limit = math.log1p(distance(np.exp(generator.normal(0, 0.1, 100_000)).tolist()))
    limit *= math.sqrt(100_000 / 50)
    share = float(np.mean(np.abs(first_S - second_S) <= limit))
    assert 0.92 < share < 0.98
    assert distance([2.0]) == 0


# ----------------------------------------------------------------------------------- latencies


def test_latencies_of_known_rounds() -> None:
    """Rounds end after 2, 3 and 7 seconds with 1, 2 and 4 tokens."""
    one = request(0, (2.0, 3.0, 7.0), (1, 2, 4), "paabaac")
    batch = BatchRecord(7.0, (one,))
    speed = speed_of([Repeat("", 0, 0, "", (batch,))], [Example("x")], None)
    assert speed["tokens_per_second"]["mean"] == 1.0
    assert speed["first_token_seconds"]["p50"] == 2.0
    assert speed["between_rounds_seconds"] == percentiles([1.0, 4.0])
    assert speed["round_seconds"] == 2.5
    assert speed["inter_token_seconds"] == percentiles([0.5, 0.5, 1.0, 1.0, 1.0, 1.0])
    assert speed["generation_seconds"]["mean"] == 7.0
    assert speed["generation_seconds"]["deviation"] == 0.0
    assert speed["by_task"] == {}


def test_deviation_of_generations() -> None:
    runs = [repeat(0, (1.0, 4), (3.0, 4)), repeat(1, (1.0, 4), (3.0, 4))]
    speed = speed_of(runs, [Example("x"), Example("y")], None)
    assert speed["generation_seconds"]["deviation"] == pytest.approx((4 / 3) ** 0.5)
    assert speed["tokens_per_second"]["mean"] == 2.0


def test_tasks_apart() -> None:
    stats: dict[str, Any] = {"rounds": 2, "drafted": 4, "accepted": 3, "emitted": 5}
    first = request(0, (1.0,), (5,), **stats, other_seconds=1.0)
    second = request(1, (1.0,), (5,), rounds=5, emitted=5, other_seconds=2.0)
    run = Repeat("", 0, 0, "", (BatchRecord(1.0, (first,)), BatchRecord(2.0, (second,))))
    speed = speed_of([run], [Example("x", task="qa"), Example("y", task="math")], None)
    assert speed["by_task"]["qa"]["acceptance_length"] == 2.5
    assert speed["by_task"]["qa"]["tokens_per_second"] == 5.0
    assert speed["by_task"]["math"]["tokens_per_second"] == 2.5
    assert speed["by_task"]["math"]["alpha"] is None
    assert speed["time_split"] == {"draft": 0.0, "target": 0.0, "other": 1.0}


def test_percentiles_of_nothing() -> None:
    assert percentiles([]) == {"mean": None, "p50": None, "p90": None, "p99": None}


# ------------------------------------------------------------------------------- token classes


def classes_of(text: str) -> list[tuple[str, str]]:
    tokenizer = byte_tokenizer(("naïve return x1",), num_tokens=258)  # bytes and little else
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    pieces = [tokenizer.decode([token]) for token in ids]
    return list(zip(pieces, TokenClasses(tokenizer).of(ids), strict=True))


def test_classes_of_tokens() -> None:
    found = classes_of("ab 12+\n\tc_d")
    assert found == [
        ("a", "word start"),
        ("b", "word rest"),
        (" ", "space"),
        ("1", "digit"),
        ("2", "digit"),
        ("+", "punctuation"),
        ("\n", "newline"),
        ("\t", "space"),
        ("c", "word start"),
        ("_", "punctuation"),
        ("d", "word rest"),
        ("<eos>", "special"),
    ]


def test_bytes_of_a_character_are_fragments() -> None:
    assert [kind for _, kind in classes_of("東")][:3] == ["fragment"] * 3


def test_acceptance_by_class_counts_verified_positions() -> None:
    tokenizer = byte_tokenizer(num_tokens=257)
    ids = tokenizer("a1b2")["input_ids"]
    found = acceptance_by_class(TokenClasses(tokenizer), [(ids, "acbp"), (ids, "aaca")])
    assert found["digit"] == {"verified": 3, "accepted": 2, "rate": pytest.approx(2 / 3)}
    assert found["word start"] == {"verified": 2, "accepted": 2, "rate": 1.0}
    assert found["word rest"] == {"verified": 1, "accepted": 0, "rate": 0.0}
    assert set(found) == {"digit", "word start", "word rest"}
