"""An error ends the request that it belongs to; the others go on."""

import warnings

import pytest
import torch
from scheduled_requests import DRAFT, PROMPTS, TARGET, alone, engine, finish, sampled
from tiny_models import engine_of, greedy, tiny, token_ids
from torch import Tensor

from outrider import Sampling
from outrider.core.errors import (
    DeadEndError,
    NonFiniteLogitsError,
    OutriderError,
    OutriderWarning,
)
from outrider.engine import Row
from outrider.engine.running_batch import RunningBatch
from outrider.runtime import HFModel

DAMAGED = 7  # the token after which a damaged model has NaN logits


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


def test_an_error_that_belongs_to_no_request_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of the engine itself, which would only be seen by the time that it takes."""
    each = engine()
    wanted = alone(each, PROMPTS[:4], greedy(12))
    leave = RunningBatch.leave
    left = [IndexError("of the engine's own")]

    def failing(self: RunningBatch) -> list[Row]:
        if len(self.rows) > 1 and left:
            raise left.pop()
        return leave(self)

    monkeypatch.setattr(RunningBatch, "leave", failing)
    told = r"each without an error: IndexError: of the engine's own \(test_errors_of_rows.py, line"
    with pytest.warns(OutriderWarning, match=told):
        results = each.generate(PROMPTS[:4], greedy(12))
    assert token_ids(results) == wanted


def test_an_error_of_a_request_is_told_by_that_request_alone() -> None:
    each = engine()
    broken = greedy(25, processors=[Raises(20)], stateless=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutriderWarning)
        with pytest.raises(RuntimeError, match="at this length"):
            each.generate(PROMPTS[:3], [greedy(20), broken, greedy(20)])


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
