"""Rows are independent: other rows, batch size, joining and leaving change no row's tokens."""

import pytest
import torch
from tiny_models import VOCAB, engine_of, greedy, ragged_prompts, tiny, token_ids, uniform_method
from transformers import LogitsProcessorList, TopKLogitsWarper

from outrider import Engine, Sampling
from outrider.core import row_keys
from outrider.engine.request import request_numbers
from outrider.engine.running_batch import RunningBatch, _compacted
from outrider.runtime import HFModel

LENGTHS = [9, 1, 17, 4, 4, 12]


@pytest.fixture(scope="module")
def target() -> HFModel:
    return tiny("llama", 0, dtype=torch.float64, std=0.2)


@pytest.fixture(scope="module")
def draft() -> HFModel:
    return tiny("llama", 0, dtype=torch.float64, std=0.18)


def mixed(temperature: float) -> list[Sampling]:
    """A different distribution in every row."""
    common = {"temperature": temperature, "ignore_eos": True}
    return [
        Sampling(max_new_tokens=18, **common),
        Sampling(max_new_tokens=25, top_k=7, seed=3, **common),
        Sampling(max_new_tokens=6, top_p=0.8, **common),
        Sampling(max_new_tokens=30, repetition_penalty=1.3, frequency_penalty=0.2, **common),
        Sampling(max_new_tokens=12, min_p=0.05, presence_penalty=0.5, **common),
        Sampling(max_new_tokens=21, top_k=20, top_p=0.9, logit_bias={3: 2.0, 5: -9.0}, **common),
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("method", ["plain", "speculative"])
def test_a_batch_gives_the_same_outputs_as_its_rows_alone(
    target: HFModel, draft: HFModel, method: str, temperature: float
) -> None:
    prompts, sampling = ragged_prompts(LENGTHS), mixed(temperature)
    engine = engine_of(target, draft, method)
    alone = [engine.generate([p], s)[0] for p, s in zip(prompts, sampling, strict=True)]
    for max_batch_size in (2, 4, 16):
        engine = engine_of(target, draft, method, max_batch_size=max_batch_size)
        results = engine.generate(prompts, sampling)
        assert token_ids(results) == token_ids(alone)
        assert [len(ids) for ids in token_ids(results)] == [s.max_new_tokens for s in sampling]
        assert [list(r.prompt_ids) for r in results] == prompts


@pytest.mark.parametrize("method", ["plain", "speculative"])
def test_rows_of_all_temperatures_share_a_batch(
    target: HFModel, draft: HFModel, method: str
) -> None:
    prompts = ragged_prompts(LENGTHS)
    sampling = [mixed(t)[row] for row, t in enumerate([0.0, 1.0, 0.7, 0.0, 1.5, 0.2])]
    engine = engine_of(target, draft, method, max_batch_size=3)
    results = engine.generate(prompts, sampling)
    alone = [engine.generate([p], s)[0] for p, s in zip(prompts, sampling, strict=True)]
    assert token_ids(results) == token_ids(alone)


def test_random_trees_in_a_batch(target: HFModel) -> None:
    """Rows alone and together, with random trees as drafts, so that acceptance varies by row."""
    target = tiny("llama", 0, dtype=torch.float64, vocab_size=5)
    engine = engine_of(target, None, uniform_method(width=2), γ=6, max_batch_size=3)
    prompts = ragged_prompts(LENGTHS, 5)
    sampling = Sampling(max_new_tokens=20, ignore_eos=True)
    results = engine.generate(prompts, sampling)
    assert token_ids(results) == token_ids([engine.generate([p], sampling)[0] for p in prompts])
    assert results.stats.accepted > 10


def test_equal_prompts_differ_and_the_first_equals_the_prompt_alone(target: HFModel) -> None:
    engine = engine_of(target)
    prompt = ragged_prompts([5])[0]
    sampling = Sampling(max_new_tokens=16, ignore_eos=True)
    results = engine.generate([prompt] * 4 + [ragged_prompts([5], seed=1)[0]], sampling)
    assert len({result.token_ids for result in results}) == 5
    assert results[0].token_ids == engine.generate([prompt], sampling)[0].token_ids
    again = engine.generate([prompt] * 2, sampling)
    assert token_ids(again) == token_ids(results[:2])
    other = engine.generate([prompt], Sampling(max_new_tokens=16, ignore_eos=True, seed=1))
    assert other[0].token_ids != results[0].token_ids


def test_many_equal_prompts_all_have_their_own_random_numbers() -> None:
    prompts = [(1, 2)] * 1000 + [(1, 2, 0), (3,)]
    numbers = request_numbers(prompts)
    keys = row_keys([0] * len(numbers), numbers, "cpu")
    assert len(set(keys.tolist())) == len(prompts)
    assert request_numbers([(3,)]) == numbers[-1:]


def test_a_finished_rows_slot_is_refilled(
    target: HFModel, draft: HFModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many short requests run one after the other beside one long request."""
    sizes: list[int] = []
    step = RunningBatch.step

    def spy(self: RunningBatch) -> object:
        sizes.append(len(self.rows))
        return step(self)

    monkeypatch.setattr(RunningBatch, "step", spy)
    engine = engine_of(target, draft, "plain", max_batch_size=3)
    sampling = [greedy(40)] + [greedy(4)] * 18
    results = engine.generate(ragged_prompts([30] + [5] * 18), sampling)
    assert [len(ids) for ids in token_ids(results)] == [40] + [4] * 18
    assert max(sizes) == 3
    assert len(sizes) == 40  # not 18 * 4 / 3 and then 40
    assert sizes[:36] == [3] * 36


def test_results_keep_the_order_of_the_prompts(target: HFModel) -> None:
    """Admission sorts by length; results do not."""
    lengths = [3, 20, 1, 8, 15, 2, 11]
    prompts = ragged_prompts(lengths)
    sampling = [greedy(1 + (7 * i) % 5) for i in range(len(lengths))]
    results = engine_of(target, max_batch_size=2).generate(prompts, sampling)
    assert [len(r.prompt_ids) for r in results] == lengths
    assert [len(r.token_ids) for r in results] == [s.max_new_tokens for s in sampling]
    assert [r.prompt for r in results] == prompts


@pytest.mark.parametrize(
    ("stays", "rows"),
    [
        ([True, True], [0, 1]),
        ([False, True, True], [2, 1]),
        ([True, False, True, False, True], [0, 4, 2]),
        ([False, False, True], [2]),
        ([False], []),
    ],
)
def test_compaction_moves_few_rows_and_only_downwards(stays: list[bool], rows: list[int]) -> None:
    assert _compacted(stays) == rows
    assert all(row >= place for place, row in enumerate(rows))


def test_processors_see_their_own_row(target: HFModel, draft: HFModel) -> None:
    """One row of a batch has a transformers processor list, the others have none."""
    prompts = ragged_prompts([6, 3, 9])
    one = Sampling(
        max_new_tokens=14, ignore_eos=True, processors=LogitsProcessorList([TopKLogitsWarper(3)])
    )
    plain = Sampling(max_new_tokens=14, ignore_eos=True)
    engine: Engine = engine_of(target, draft)
    results = engine.generate(prompts, [plain, one, plain])
    alone = [engine.generate([p], s)[0] for p, s in zip(prompts, [plain, one, plain], strict=True)]
    assert token_ids(results) == token_ids(alone)
    assert VOCAB > 3
