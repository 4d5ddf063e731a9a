"""The scheduler: requests arrive, leave and fail one by one, and change no other request's output.

Steps are counted, never timed. Where threads take part, their order is forced by the step that they
are in, or does not matter.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from threading import Barrier, Event, Thread
from typing import Any

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids
from torch import Tensor

from outrider import Engine, Sampling
from outrider.core.errors import (
    DeadEndError,
    InvalidParameterError,
    NonFiniteLogitsError,
    OutriderError,
)
from outrider.engine import Result, Row, Scheduler
from outrider.engine import scheduler as scheduling
from outrider.engine.running_batch import RunningBatch
from outrider.runtime import HFModel, prefill
from outrider.runtime.kv_cache.cache import KVCache

TARGET = tiny(dtype=torch.float64, std=0.2)
DRAFT = tiny(dtype=torch.float64, std=0.18)
LENGTHS = [9, 1, 17, 4, 4, 12, 30, 2, 8, 5, 21, 3, 6, 11, 7, 14]
PROMPTS = ragged_prompts(LENGTHS)
DAMAGED = 7  # the token behind which a damaged model has NaN logits


def engine(method: str = "speculative", **settings: Any) -> Engine:
    return engine_of(TARGET, None if method == "plain" else DRAFT, method, **settings)


def sampled(num: int, **settings: Any) -> Sampling:
    return Sampling(temperature=0.9, max_new_tokens=num, ignore_eos=True, **settings)


def alone(each: Engine, prompts: Sequence[list[int]], sampling: Sampling) -> list[tuple[int, ...]]:
    """What each prompt gives by itself."""
    return [each.generate([prompt], sampling)[0].token_ids for prompt in prompts]


def finish(scheduler: Scheduler, num_requests: int) -> dict[int, Row]:
    """Runs steps until so many requests are over; their rows."""
    rows: dict[int, Row] = {}
    for _ in range(1000):
        rows |= {each.request_id: each.row for each in scheduler.step() if each.row.over}
        if len(rows) == num_requests:
            return rows
    raise AssertionError("requests do not end")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[RunningBatch]:
    """The running batches that are made."""
    made: list[RunningBatch] = []
    init = RunningBatch.__init__

    def noting(self: RunningBatch, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        made.append(self)

    monkeypatch.setattr(RunningBatch, "__init__", noting)
    return made


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Row]]:
    """The rows of each round."""
    seen: list[list[Row]] = []
    step = RunningBatch.step

    def noting(self: RunningBatch) -> None:
        seen.append(list(self.rows))
        step(self)

    monkeypatch.setattr(RunningBatch, "step", noting)
    return seen


# ------------------------------------------------------------------------- arrivals and departures


@pytest.mark.parametrize("sampling", [greedy(36), sampled(36)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["plain", "speculative"])
def test_16_streams_share_one_running_batch(
    method: str, sampling: Sampling, batches: list[RunningBatch], rounds: list[list[Row]]
) -> None:
    """Opened one after another while the others run: each is what its prompt gives alone."""
    wanted = alone(engine(method, γ=1), PROMPTS, sampling)
    batches.clear()
    rounds.clear()
    shared = engine(method, γ=1)
    streams = [shared.stream(prompt, sampling) for prompt in PROMPTS]
    outputs = [list(next(stream).token_ids) for stream in streams]
    assert [len(rows) for rows in rounds] == list(range(1, 17))
    for stream, output in zip(streams, outputs, strict=True):
        output.extend(token for event in stream for token in event.token_ids)
    assert list(map(tuple, outputs)) == wanted
    assert len(batches) == 1
    assert len(rounds) < sum(map(len, wanted)) / 4
    assert shared._dispatcher.scheduler.batches == []


def test_requests_are_added_and_aborted_between_steps() -> None:
    each = engine()
    wanted = alone(each, PROMPTS[:4], sampled(20))
    scheduler = each.new_scheduler()
    ids = [scheduler.add(each.request(prompt, sampled(20))) for prompt in PROMPTS[:2]]
    first = scheduler.step()
    assert [progress.request_id for progress in first] == ids
    ids += [scheduler.add(each.request(prompt, sampled(20))) for prompt in PROMPTS[2:4]]
    scheduler.abort(ids[1])
    assert [len(batch.rows) for batch in scheduler.batches] == [1]
    scheduler.step()
    assert [len(batch.rows) for batch in scheduler.batches] == [3]
    rows = finish(scheduler, 3)
    assert [tuple(rows[i].token_ids) for i in (ids[0], *ids[2:])] == [wanted[i] for i in (0, 2, 3)]
    assert scheduler.batches == []
    assert scheduler.step() == []


def test_aborting_what_waits_what_is_over_and_what_never_was() -> None:
    each = engine(max_batch_size=1)
    scheduler = each.new_scheduler()
    ids = [scheduler.add(each.request(prompt, greedy(9))) for prompt in PROMPTS[:3]]
    scheduler.step()
    scheduler.abort(ids[1])
    scheduler.abort(99)
    assert set(finish(scheduler, 2)) == {ids[0], ids[2]}
    scheduler.abort(ids[0])
    assert scheduler.step() == []


def test_rows_are_admitted_in_the_order_of_their_arrival(rounds: list[list[Row]]) -> None:
    each = engine("plain", max_batch_size=2)
    scheduler = each.new_scheduler()
    prompts = PROMPTS[:6]
    ids = [scheduler.add(each.request(prompt, greedy(3))) for prompt in prompts]
    finish(scheduler, 6)
    seen = [list(row.request.prompt_ids) for row in dict.fromkeys(chain(*rounds))]
    assert seen == prompts
    assert ids == sorted(ids)


def test_a_closed_stream_leaves_the_others_alone() -> None:
    each = engine()
    wanted = alone(each, PROMPTS[:3], sampled(20))
    streams = [each.stream(prompt, sampled(20)) for prompt in PROMPTS[:3]]
    outputs = [list(next(stream).token_ids) for stream in streams]
    streams[1].close()  # type: ignore[attr-defined]
    for i in (0, 2):
        outputs[i].extend(token for event in streams[i] for token in event.token_ids)
    assert [tuple(outputs[i]) for i in (0, 2)] == [wanted[0], wanted[2]]


def test_numbers_come_from_the_caller_or_from_the_prompt() -> None:
    each = engine()
    prompt, other = PROMPTS[0], PROMPTS[2]
    derived = each.generate([prompt, prompt], sampled(12))
    numbered = each.generate([other, prompt, prompt], sampled(12), request_numbers=[1, 5, 6])
    assert token_ids(derived)[0] == alone(each, [prompt], sampled(12))[0]
    assert len({*token_ids(derived), *token_ids(numbered)[1:]}) == 4
    for i, number in ((1, 5), (2, 6)):
        events = each.stream(prompt, sampled(12), request_number=number)
        again = tuple(token for event in events for token in event.token_ids)
        assert again == numbered[i].token_ids
    single = each.generate(torch.tensor(prompt), sampled(12), request_numbers=5)
    assert isinstance(single, Result)
    assert single.token_ids == numbered[1].token_ids


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([1], "1 request numbers for 2 prompts"),
        (3, "1 request numbers for 2 prompts"),
        ([1, -1], "request_numbers=-1"),
        ([1, 2**64], "request_numbers=18446744073709551616"),
        (["a", "b"], "request_numbers='a'"),
    ],
)
def test_other_numbers(numbers: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        engine("plain").generate(PROMPTS[:2], greedy(3), request_numbers=numbers)


# ------------------------------------------------------------------------------- kinds of batches


@pytest.mark.parametrize("method", ["relaxed", "cascade"])
def test_greedy_and_sampled_requests_take_turns(method: str, rounds: list[list[Row]]) -> None:
    """These methods verify greedy requests by another rule; neither kind waits for the other."""
    each = engine(method)
    samplings = [greedy(20), sampled(20), greedy(20), sampled(20)]
    wanted = [
        each.generate([prompt], sampling)[0].token_ids
        for prompt, sampling in zip(PROMPTS, samplings, strict=False)
    ]
    rounds.clear()
    assert token_ids(each.generate(PROMPTS[:4], samplings)) == wanted
    kinds = [{row.request.sampling.greedy for row in rows} for rows in rounds]
    assert all(len(kind) == 1 for kind in kinds)
    changes = sum(kind != after for kind, after in pairwise(kinds))
    both = 2 * min(kinds.count({True}), kinds.count({False}))
    assert changes >= both - 1


def test_in_order_requests_run_beside_the_others(rounds: list[list[Row]]) -> None:
    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    each = engine()
    in_order = greedy(12, processors=[processor], stateless=False)
    results = each.generate(PROMPTS[:2], [greedy(40), in_order])
    assert results[1].stats.drafted == 0 < results[0].stats.drafted
    assert results[1].token_ids == alone(each, [PROMPTS[1]], greedy(12))[0]
    kinds = [rows[0].request.sampling.in_order for rows in rounds[: 2 * results[0].stats.rounds]]
    assert kinds[:8] == [kinds[0], not kinds[0]] * 4


def test_all_kinds_together_keep_to_the_batch_size(rounds: list[list[Row]]) -> None:
    each = engine("relaxed", max_batch_size=3)
    scheduler = each.new_scheduler()
    samplings = [greedy(6), sampled(6)] * 5
    for prompt, sampling in zip(PROMPTS, samplings, strict=False):
        scheduler.add(each.request(prompt, sampling))
    over, most = 0, 0
    while over < 10:
        over += sum(progress.row.over for progress in scheduler.step())
        most = max(most, sum(batch.num_rows for batch in scheduler.batches))
    assert most == 3


# ------------------------------------------------------------------------------- chunked prefill


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> int:
    """Passes of 8 tokens, two of them per step; the bound."""
    monkeypatch.setattr(prefill, "PREFILL_WIDTH", 8)
    monkeypatch.setattr(scheduling, "PREFILL_WIDTH", 8)
    monkeypatch.setattr(scheduling, "PROMPT_TOKENS_PER_STEP", 16)
    return 16


@pytest.mark.parametrize("method", ["plain", "speculative", "early-exit"])
def test_a_long_prompt_is_prefilled_between_rounds(
    method: str, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step reads more than the bound, running rows have a round in each, and every output is
    the one of the same passes without a round in between."""
    model = tiny(dtype=torch.float64, std=0.2, num_hidden_layers=3)
    each = engine_of(model, DRAFT if method == "speculative" else None, method)
    long, short = ragged_prompts([70, 5], seed=1)
    wanted = alone(each, [short, long], greedy(40))
    read: list[int] = []
    step = prefill.Prefill.step

    def noting(self: prefill.Prefill) -> None:
        if self._model is each.target:
            read.append(self.next_width)
        step(self)

    monkeypatch.setattr(prefill.Prefill, "step", noting)
    scheduler = each.new_scheduler()
    ids = [scheduler.add(each.request(short, greedy(40)))]
    scheduler.step()
    ids.append(scheduler.add(each.request(long, greedy(40))))
    outputs: dict[int, tuple[int, ...]] = {}
    steps_before_joining = 0
    while len(outputs) < 2:
        read.clear()
        progress = scheduler.step()
        assert sum(read) <= narrow
        steps_before_joining += ids[1] not in [p.request_id for p in progress] and not outputs
        assert ids[0] in [p.request_id for p in progress] or ids[0] in outputs
        outputs |= {p.request_id: tuple(p.row.token_ids) for p in progress if p.row.over}
    assert steps_before_joining >= 69 // narrow
    assert [outputs[i] for i in ids] == wanted


def test_newcomers_share_passes_within_the_bound(
    narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of short and long prompts."""
    each = engine("plain")
    read: list[int] = []
    step = prefill.Prefill.step

    def noting(self: prefill.Prefill) -> None:
        read.append(self.next_width * self.cache.num_rows)
        step(self)

    monkeypatch.setattr(prefill.Prefill, "step", noting)
    scheduler = each.new_scheduler()
    scheduler.add(each.request(PROMPTS[0], greedy(60)))
    scheduler.step()
    for prompt in ragged_prompts([3, 40, 2, 2, 2, 2, 2, 2, 30, 4], seed=4):
        scheduler.add(each.request(prompt, greedy(2)))
    over = 0
    while over < 10:
        read.clear()
        over += sum(progress.row.over for progress in scheduler.step())
        assert sum(read) <= narrow


def test_chunks_are_bit_identical_to_one_prefill(narrow: int) -> None:
    """Float32: the keys and values of a prompt read pass by pass, with rounds in between, are
    exactly those of ``start``."""
    model = tiny(dtype=torch.float32, std=0.2)
    each = engine_of(model)
    long, short = ragged_prompts([60, 5], seed=2)
    scheduler = each.new_scheduler()
    scheduler.add(each.request(short, greedy(60)))
    scheduler.step()
    scheduler.add(each.request(long, greedy(1)))
    (batch,) = scheduler.batches
    while not batch.newcomers:
        scheduler.step()
    newcomers = batch._newcomers
    assert newcomers is not None
    whole = model.start(newcomers.context)
    while not newcomers.are_cached:
        scheduler.step()
    for ours, theirs in zip(newcomers._prefill.finish().in_use(), whole.in_use(), strict=True):
        assert torch.equal(ours[:, :, :59], theirs[:, :, :59])


def test_a_newcomer_is_aborted_in_the_middle_of_its_prefill(narrow: int) -> None:
    each = engine()
    prompts = ragged_prompts([5, 60, 50], seed=3)
    wanted = alone(each, prompts, greedy(30))
    scheduler = each.new_scheduler()
    ids = [scheduler.add(each.request(prompts[0], greedy(30)))]
    scheduler.step()
    ids += [scheduler.add(each.request(prompt, greedy(30))) for prompt in prompts[1:]]
    scheduler.step()
    (batch,) = scheduler.batches
    assert len(batch.newcomers) == 2
    scheduler.abort(ids[1])
    assert [list(row.request.prompt_ids) for row in batch.newcomers] == [prompts[2]]
    rows = finish(scheduler, 2)
    assert [tuple(rows[i].token_ids) for i in (ids[0], ids[2])] == [wanted[0], wanted[2]]


def test_short_prompts_do_not_wait(rounds: list[list[Row]]) -> None:
    """Within the bound on prompt tokens a request joins in the step that admits it."""
    each = engine()
    scheduler = each.new_scheduler()
    for num, prompt in enumerate(PROMPTS[:4], 1):
        scheduler.add(each.request(prompt, greedy(50)))
        scheduler.step()
        assert len(rounds[-1]) == num


# ------------------------------------------------------------------------------- errors of a row


def damaged(seed: int = 0) -> HFModel:
    model = tiny(dtype=torch.float64, std=0.2, seed=seed)
    with torch.no_grad():
        model.module.get_input_embeddings().weight[DAMAGED] = torch.nan
    return model


class Raises:
    """A processor that raises from a length on."""

    def __init__(self, length: int, error: type[BaseException] = RuntimeError) -> None:
        self.length = length
        self.error = error

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.length:
            raise self.error("at this length")
        return scores


@pytest.mark.parametrize("method", ["plain", "speculative"])
def test_nan_ends_its_row_only_and_leaves_nothing_behind(method: str) -> None:
    """Requests that join after it take its row in the KV buffers, whose NaN they must not see."""
    each = engine_of(damaged(), None if method == "plain" else DRAFT, method, max_batch_size=2)
    never = {DAMAGED: -1e9}
    prompts = [[p if p != DAMAGED else 8 for p in prompt] for prompt in PROMPTS[:6]]
    sampling = greedy(30, logit_bias=never)
    wanted = alone(each, prompts, sampling)
    bad = [*range(1, 40), DAMAGED]
    scheduler = each.new_scheduler()
    order = [prompts[0], bad, *prompts[1:3], bad, *prompts[3:]]
    ids = [scheduler.add(each.request(prompt, sampling)) for prompt in order]
    rows = finish(scheduler, len(order))
    failed = [rows[i].error is not None for i in ids]
    assert failed == [prompt is bad for prompt in order]
    assert isinstance(rows[ids[1]].error, NonFiniteLogitsError)
    assert [
        tuple(rows[i].token_ids) for i, bad in zip(ids, failed, strict=True) if not bad
    ] == wanted


def test_nan_of_the_draft_model_ends_its_row_only() -> None:
    each = engine_of(TARGET, damaged())
    prompts = [[1, 2, 3], [4, DAMAGED], [5, 6]]
    sampling = greedy(9, logit_bias={DAMAGED: -1e9})
    wanted = alone(each, [prompts[0], prompts[2]], sampling)
    with pytest.raises(NonFiniteLogitsError) as caught:
        each.generate(prompts, sampling)
    first, failed, last = caught.value.results  # type: ignore[attr-defined]
    assert failed is None
    assert [first.token_ids, last.token_ids] == wanted


def test_the_first_error_in_the_order_of_the_prompts_is_raised() -> None:
    each = engine()
    late = greedy(20, processors=[Raises(19)], stateless=True)
    soon = greedy(20, processors=[Raises(6, ValueError)], stateless=True)
    with pytest.raises(RuntimeError) as caught:
        each.generate([PROMPTS[0], PROMPTS[3], PROMPTS[4]], [late, soon, greedy(20)])
    results = caught.value.results  # type: ignore[attr-defined]
    assert results[:2] == (None, None)
    assert results[2].token_ids == alone(each, [PROMPTS[4]], greedy(20))[0]


def test_a_stream_raises_its_own_error_only() -> None:
    each = engine()
    infinite = {token: float("-inf") for token in range(101)}
    wanted = alone(each, [PROMPTS[0]], sampled(20))[0]
    healthy = each.stream(PROMPTS[0], sampled(20))
    output = list(next(healthy).token_ids)
    with pytest.raises(DeadEndError):
        list(each.stream(PROMPTS[1], greedy(20, logit_bias=infinite)))
    output.extend(token for event in healthy for token in event.token_ids)
    assert tuple(output) == wanted


@pytest.mark.parametrize("sampling", [greedy(25), sampled(25)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["plain", "speculative", "staged", "suffix"])
def test_an_exception_ends_the_request_that_it_belongs_to(method: str, sampling: Sampling) -> None:
    """Nobody says which row a processor's exception belongs to; the others go on from their
    tokens, which an exception in any part of a round leaves as they were."""
    each = engine(method)
    wanted = alone(each, PROMPTS[:4], sampling)
    broken = greedy(25, processors=[Raises(20)], stateless=True)
    samplings = [sampling, sampling, broken, sampling, sampling]
    prompts = [*PROMPTS[:2], PROMPTS[5], *PROMPTS[2:4]]
    with pytest.raises(RuntimeError, match="at this length") as caught:
        each.generate(prompts, samplings)
    results = caught.value.results  # type: ignore[attr-defined]
    assert results[2] is None
    assert token_ids([result for result in results if result is not None]) == wanted
    assert each._dispatcher.scheduler.batches == []


def test_an_interrupt_ends_the_drivers_request_only() -> None:
    """KeyboardInterrupt comes at any place of a round, and is nobody's in the batch."""
    each = engine()
    wanted = alone(each, PROMPTS[:2], sampled(25))
    streams = [each.stream(prompt, sampled(25)) for prompt in PROMPTS[:2]]
    outputs = [list(next(stream).token_ids) for stream in streams]
    broken = sampled(25, processors=[Raises(20, KeyboardInterrupt)], stateless=True)
    with pytest.raises(KeyboardInterrupt):
        list(each.stream(PROMPTS[5], broken))
    for stream, output in zip(streams, outputs, strict=True):
        output.extend(token for event in stream for token in event.token_ids)
    assert list(map(tuple, outputs)) == wanted


def test_in_order_rows_are_not_called_twice_for_a_position() -> None:
    """Their processors have seen the round that was cut short, which therefore cannot be repeated:
    of two such requests the one with the exception has it as its cause, and so has the other."""
    each = engine()
    calls: list[int] = []

    def counting(input_ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(input_ids.shape[1])
        return scores

    in_order = [
        greedy(20, processors=[counting], stateless=False),
        greedy(20, processors=[Raises(8)], stateless=False),
        greedy(20),
    ]
    with pytest.raises(OutriderError, match="make the request again") as caught:
        each.generate(PROMPTS[3:6], in_order)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert len(calls) == len(set(calls))
    last = caught.value.results[2]  # type: ignore[attr-defined]
    assert last.token_ids == alone(each, [PROMPTS[5]], greedy(20))[0]


def test_memory_of_failed_rows_is_given_back() -> None:
    bound = 4 * 2**20
    each = engine(max_memory=bound)
    broken = greedy(25, processors=[Raises(20)], stateless=True)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            each.generate(PROMPTS[:3], [greedy(20), broken, greedy(20)])
    assert each._memory is not None
    assert sum(each._memory.reservations.values()) == 0
    assert each.target.plan.memory_budget is not None
    assert each.target.plan.memory_budget.held() == 0


# --------------------------------------------------------------------------- threads and asyncio


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    barrier = Barrier(len(calls))

    def begin(call: Callable[[], Any]) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(begin, calls))


def test_threads_share_one_running_batch(batches: list[RunningBatch]) -> None:
    sampling = sampled(20)
    wanted = alone(engine(), PROMPTS[:8], sampling)
    batches.clear()
    shared = engine()
    holding = shared.stream(PROMPTS[8], sampled(60))  # so that the batch is never empty
    next(holding)
    calls = [lambda p=p: shared.generate([p], sampling)[0].token_ids for p in PROMPTS[:8]]
    assert in_threads(calls) == wanted
    assert len(batches) == 1
    del holding


def test_asyncio_tasks_share_one_running_batch(batches: list[RunningBatch]) -> None:
    sampling = sampled(20)
    wanted = alone(engine(), PROMPTS[:8], sampling)
    batches.clear()
    shared = engine()

    async def output(prompt: list[int]) -> tuple[int, ...]:
        return tuple(
            [t async for event in shared.stream_async(prompt, sampling) for t in event.token_ids]
        )

    async def all_outputs() -> list[tuple[int, ...]]:
        return await asyncio.gather(*map(output, PROMPTS[:8]))

    assert asyncio.run(all_outputs()) == wanted
    assert len(batches) <= 2  # one request may be over before the others are added


def test_a_cancelled_task_ends_its_request_only() -> None:
    shared = engine()
    wanted = alone(shared, [PROMPTS[0]], sampled(30))[0]

    async def cancelled() -> None:
        async for _ in shared.stream_async(PROMPTS[1], greedy(60)):
            started.set()

    async def main() -> tuple[int, ...]:
        task = asyncio.create_task(cancelled())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        events = shared.stream_async(PROMPTS[0], sampled(30))
        return tuple([token async for event in events for token in event.token_ids])

    started = asyncio.Event()
    assert asyncio.run(main()) == wanted
    assert shared._dispatcher.scheduler.batches == []


def test_requests_are_added_and_aborted_while_another_thread_runs_a_step() -> None:
    """Neither waits for the step, which a processor holds up until they have returned."""
    shared = engine()
    wanted = alone(shared, PROMPTS[:1], sampled(20))
    in_step, go_on = Event(), Event()

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        in_step.set()
        assert go_on.wait(60)
        return scores

    scheduler = shared.new_scheduler()
    held = greedy(2, processors=[processor], stateless=True)
    first = scheduler.add(shared.request(PROMPTS[1], held))
    second = scheduler.add(shared.request(PROMPTS[2], greedy(90)))
    thread = Thread(target=scheduler.step)
    thread.start()
    assert in_step.wait(60)
    third = scheduler.add(shared.request(PROMPTS[0], sampled(20)))
    scheduler.abort(second)
    scheduler.abort(first)
    go_on.set()
    thread.join()
    assert [len(batch.rows) for batch in scheduler.batches] == []
    assert tuple(finish(scheduler, 1)[third].token_ids) == wanted[0]


def test_closing_from_another_thread_wakes_the_reader() -> None:
    shared = engine()
    in_step, go_on = Event(), Event()

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        in_step.set()
        assert go_on.wait(60)
        return scores

    held = greedy(9, processors=[processor], stateless=True)
    driver = shared._dispatcher.subscribe([shared.request(PROMPTS[1], held)], lambda row: row)
    reader = shared._dispatcher.subscribe([shared.request(PROMPTS[2], greedy(90))], lambda row: row)
    with ThreadPoolExecutor(2) as pool:
        driving = pool.submit(driver.next)
        assert in_step.wait(60)
        reading = pool.submit(reader.next)
        reader.close()
        assert reading.result(60) is None  # although the step goes on
        driver.close()
        go_on.set()
        assert driving.result(60) is None
    assert shared._dispatcher.scheduler.batches == []
    assert not [thing for thing in live_caches() if thing.num_rows]


def live_caches() -> Iterator[KVCache]:
    import gc

    gc.collect()
    return (thing for thing in gc.get_objects() if type(thing) is KVCache)
