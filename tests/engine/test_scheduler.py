"""The scheduler: requests arrive and leave one by one, and change no other request's output.

Steps are counted, never timed.
"""

from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from scheduled_requests import PROMPTS, alone, engine, finish, sampled
from tiny_models import greedy, token_ids
from torch import Tensor

from outrider import Sampling
from outrider.core.errors import (
    InvalidParameterError,
)
from outrider.engine import Result, Row
from outrider.engine.running_batch import RunningBatch

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
    """Two at a time, of which the longer one stands first."""
    each = engine("plain", max_batch_size=2)
    scheduler = each.new_scheduler()
    prompts = PROMPTS[:6]
    ids = [scheduler.add(each.request(prompt, greedy(3))) for prompt in prompts]
    finish(scheduler, 6)
    seen = [list(row.request.prompt_ids) for row in dict.fromkeys(chain(*rounds))]
    pairs = [prompts[i : i + 2] for i in range(0, 6, 2)]
    assert seen == [each for pair in pairs for each in sorted(pair, key=len, reverse=True)]
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
