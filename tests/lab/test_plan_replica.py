"""A replica under load against queueing theory, and the choice among options."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.pass_times import largest_batch, speedup_at_batch
from outrider.lab.analysis.speedup import optimal_gamma
from outrider.lab.plan import (
    MeasuredPasses,
    Passes,
    Question,
    Replica,
    Workload,
    accelerator,
    model_size,
    plan,
)


@dataclass(frozen=True)
class Free:
    """Passes that take ``per_row`` seconds per row, and ``each`` besides; prefill is free."""

    per_row: float = 0.0
    each: float = 0.0

    def seconds(self, rows: int, width: int, context: float) -> float:
        return 0.0 if width > 1 else self.each + self.per_row * rows


def replica(passes: Passes, rows: int, tokens: int = 10) -> Replica:
    return Replica(passes, None, 0.0, Workload(1.0, 2, tokens), rows)


def test_one_row_is_mm1() -> None:
    """μ = 1 request per second: N = ρ / (1 - ρ), and waiting ρ² / (1 - ρ)."""
    state = replica(Free(each=0.1), 1).under(0.6)
    assert state.rows == pytest.approx(0.6)
    assert state.busy == pytest.approx(0.6)
    assert state.waiting == pytest.approx(0.36 / 0.4)
    assert state.request == pytest.approx(1 / 0.4)
    assert state.per_token == pytest.approx(0.1)


def test_rows_that_share_one_processor_are_mm1_as_well() -> None:
    """With round times in proportion to the rows, all rows together work at a constant rate:
    processor sharing, whose mean time of a request is that of M/M/1."""
    state = replica(Free(per_row=0.1), 400).under(0.6)
    assert state.rows == pytest.approx(1.5)
    assert state.waiting == pytest.approx(0, abs=1e-12)
    assert state.request == pytest.approx(1 / 0.4)


def test_rows_that_do_not_slow_each_other_are_mm_infinity() -> None:
    """A request takes one second whatever runs beside it, so λ requests run on average."""
    state = replica(Free(each=0.1), 200).under(30.0)
    assert state.rows == pytest.approx(30)
    assert state.request == pytest.approx(1)
    assert state.busy == pytest.approx(1 - math.exp(-30))


def test_few_such_rows_are_erlang_c() -> None:
    load, rows = 2.0, 3
    terms = [load**n / math.factorial(n) for n in range(rows)]
    last = load**rows / math.factorial(rows) * rows / (rows - load)
    waits = last / (sum(terms) + last)
    state = replica(Free(each=0.1), rows).under(load)
    assert state.waiting == pytest.approx(waits * load / (rows - load))
    assert state.rows == pytest.approx(load)
    assert state.first_token == pytest.approx(waits / (rows - load) + 0.1)


def test_prefill_takes_the_whole_replica() -> None:
    passes = MeasuredPasses({1: 0.1, 2: 0.5})
    found = replica(passes, 1)
    assert found.prefill_seconds == pytest.approx(0.5)
    assert found.max_load == pytest.approx(1 / 1.5)


def test_no_steady_state_at_the_largest_load() -> None:
    with pytest.raises(InvalidParameterError, match=r"serves less than 1 requests per second"):
        replica(Free(each=0.1), 1).under(1.0)


TARGET = {1: 1.0, 8: 1.1, 16: 2.0, 32: 4.0, 64: 8.0, 1000: 125.0}
DRAFT = {1: 0.05, 16: 0.08, 64: 0.3, 1000: 4.5}


def drafting(rows: int, **settings: Any) -> Replica:
    passes = MeasuredPasses(TARGET), MeasuredPasses(DRAFT)
    return Replica(*passes, 0.7, Workload(0.01, 1, 10), rows, **settings)


def test_speedups_and_the_last_paying_batch_are_those_of_the_formula() -> None:
    found = drafting(40, max_gamma=6)
    target, draft = (
        lambda n, times=times: MeasuredPasses(times).seconds(n, 1, 0) for times in (TARGET, DRAFT)
    )
    for rows in (1, 3, 8, 20):
        best = max(speedup_at_batch(0.7, gamma, target, draft, rows) for gamma in range(1, 7))
        assert found.speedup(rows) == pytest.approx(max(1.0, best))
    last = largest_batch(0.7, range(1, 7), target, draft, 40)
    assert found.last_paying_batch == last
    assert 0 < last < 40
    assert found.gammas[last] == 0


def test_gamma_at_batch_one_is_the_optimum_of_leviathan() -> None:
    flat = Replica(
        MeasuredPasses({1: 1.0}), MeasuredPasses({1: 0.1}), 0.8, Workload(0.01, 1, 10), 1, 20
    )
    assert flat.gammas == (optimal_gamma(0.8, 0.1),)


def test_no_draft_is_longer_than_allowed() -> None:
    assert drafting(3, max_gamma=2).gammas == (2, 2, 2)
    assert drafting(3, max_gamma=0).gammas == (0, 0, 0)


# ------------------------------------------------------------------------------------ options


def question(load: float = 5.0, **settings: Any) -> Question:
    values: dict[str, Any] = {
        "target": model_size("70B"),
        "draft": model_size("1B"),
        "on": accelerator("h100"),
        "num_gpus": 8,
        "workload": Workload(load),
        "alpha": 0.7,
    }
    return Question(**(values | settings))


def test_the_plan_is_the_fastest_option_that_serves() -> None:
    found = plan(question())
    serving = [each for each in found.options if each.state is not None]
    times = [each.state.request for each in serving if each.state is not None]
    assert found.best.state is not None
    assert found.best.state.request == min(times)
    assert {each.degree for each in found.options} == {2, 4, 8}  # one H100 holds no 70B
    assert all(each.degree * each.replicas == 8 for each in found.options)
    assert found.plain.draft_on == "none"
    assert found.plain.replica.gammas[0] == 0
    assert any("0.7" in each for each in found.assumptions)
    assert found.as_dict()["best"]["tensor_parallel"] == found.best.degree


def test_more_load_means_more_rows_and_shorter_drafts() -> None:
    light, heavy = (plan(question(load, num_gpus=4)).best for load in (0.5, 13.0))
    assert light.state is not None
    assert heavy.state is not None
    assert light.state.rows < heavy.state.rows
    assert light.gamma > heavy.gamma


def test_gamma_ranges_tell_where_speculation_stops() -> None:
    passes = {"target": MeasuredPasses(TARGET), "draft": MeasuredPasses(DRAFT)}
    work = Workload(0.01, 1, 10)
    found = plan(question(passes=passes, workload=work, on=accelerator("b200"), max_batch=40)).best
    assert found.degree == 1
    assert found.replicas == 8
    first, last, gamma = found.gamma_ranges[-1]
    assert (last, gamma) == (40, 0)
    assert found.replica.last_paying_batch == first - 1
    assert found.last_paying_load == pytest.approx(8 * found.replica.request_rate(first - 1))


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(InvalidParameterError, match=r"140 GB.*; 2 GPUs would hold it"):
        plan(question(num_gpus=1))
    with pytest.raises(InvalidParameterError, match="no server of 8 such GPUs holds it"):
        plan(question(target=model_size("2T")))
    long = Workload(0.1, 512, 100_000_000)
    message = "weights take 16 GB and the KV cache of a request of 100000512 tokens 1.31e"
    with pytest.raises(InvalidParameterError, match=message):
        plan(question(target=model_size("8B"), workload=long))


def test_a_load_that_is_too_high_names_the_gpus_that_would_do() -> None:
    with pytest.raises(InvalidParameterError, match=r"8 × h100 serve at most .*; (\d+) would") as e:
        plan(question(load=500.0))
    needed = int(str(e.value).split("tokens; ")[1].split(" would")[0])
    assert plan(question(load=500.0, num_gpus=needed)).best.state is not None
    with pytest.raises(InvalidParameterError, match="serve at most"):
        plan(question(load=500.0, num_gpus=int(needed * 0.8)))


def test_a_time_per_token_that_no_number_of_gpus_reaches() -> None:
    with pytest.raises(InvalidParameterError, match="no number of GPUs is that fast"):
        plan(question(max_per_token=1e-5))
    with pytest.raises(InvalidParameterError, match="2 GPUs do not reach it under this load"):
        plan(question(0.1, num_gpus=2, max_per_token=0.006))  # 8 do
    assert plan(question(0.1, max_per_token=0.006)).best.degree == 8
    with pytest.raises(InvalidParameterError, match="8 GPUs do not reach it under this load"):
        plan(question(load=22.0, max_per_token=0.006))


def test_a_draft_that_does_not_pay_is_left_out() -> None:
    """Its passes take as long as the target's, and so does its part of prefill."""
    passes = {"target": MeasuredPasses(TARGET), "draft": MeasuredPasses(TARGET)}
    work = Workload(0.01, 100, 10)
    found = plan(question(passes=passes, workload=work, on=accelerator("b200"), alpha=0.5))
    assert found.best.draft_on == "none"
    assert found.best is found.plain
    drafting = found.drafting
    assert drafting is not None
    assert set(drafting.replica.gammas) == {0}
    assert drafting.state is not None
    assert found.best.state is not None
    assert drafting.state.request > found.best.state.request


def test_a_target_that_fits_only_without_its_draft() -> None:
    found = plan(question(0.1, target=model_size("35B"), draft=model_size("3B"), num_gpus=1))
    assert found.best.draft_on == "none"
    assert found.drafting is None


def test_plain_decoding_alone() -> None:
    found = plan(question(draft=None))
    assert found.best.draft_on == "none"
    assert found.best.gamma == 0
    assert found.best.replica.last_paying_batch == 0


def test_the_draft_needs_measured_times_too() -> None:
    passes = {"target": MeasuredPasses(TARGET)}
    with pytest.raises(InvalidParameterError, match="no times of the draft"):
        plan(question(passes=passes, on=accelerator("b200")))
    assert replace(question(), passes=passes).degrees == [1]
