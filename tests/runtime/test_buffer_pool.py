"""KV buffers of caches that are gone serve the next ones, each in its own place."""

from dataclasses import replace

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider.runtime import HFModel, KVCache
from outrider.runtime.kv_cache.buffer_pool import BufferPool
from outrider.runtime.prefill import unsampled_context

LIKE = torch.zeros(1)


def pooled(seed: int = 0) -> HFModel:
    model = tiny("llama", seed)
    model.plan = replace(model.plan, pool=BufferPool(2**30))
    return model


def addresses(cache: KVCache) -> list[int]:
    return [buffer.data_ptr() for buffer in cache.own_in_use()]


def started(model: HFModel, length: int = 9, rows: int = 1) -> KVCache:
    with torch.inference_mode():
        return model.start(unsampled_context(model, list(range(1, length + 1)), rows))


def test_the_next_cache_has_each_buffer_in_its_place() -> None:
    model = pooled()
    cache = started(model)
    before = addresses(cache)
    assert len(set(before)) == 2 * model.num_layers
    del cache
    for length in (9, 30, 2):  # all have 64 slots
        assert addresses(started(model, length)) == before


def test_caches_that_live_have_buffers_of_their_own() -> None:
    model = pooled()
    first = started(model)
    second = started(model)
    assert not set(addresses(first)) & set(addresses(second))
    both = {*addresses(first), *addresses(second)}
    del first, second
    third, fourth, fifth = (started(model) for _ in range(3))
    assert {*addresses(third), *addresses(fourth)} == both
    assert not set(addresses(fifth)) & both


def test_other_sizes_have_other_buffers() -> None:
    model = pooled()
    small = addresses(started(model))
    cache = started(model, 70)
    assert cache.own_in_use()[0].shape[2] == 128
    wide = addresses(started(model, rows=2))
    assert not set(small) & set(addresses(cache))
    assert addresses(started(model)) == small
    assert addresses(started(model, rows=2)) == wide


def test_buffers_that_were_outgrown_are_free() -> None:
    model = pooled()
    small = addresses(started(model, 60))
    cache = started(model, 60)
    assert addresses(cache) == small
    with torch.inference_mode():
        model.extend(cache, torch.ones(1, 20, dtype=torch.int64))
    assert cache.own_in_use()[0].shape[2] == 128
    assert addresses(started(model, 60)) == small


def test_a_row_of_a_cache_returns_nothing() -> None:
    model = pooled()
    cache = started(model, rows=2)
    view = cache.row(1, unsampled_context(model, [0, 0]))
    del view
    assert not set(addresses(cache)) & set(addresses(started(model)))


def test_nothing_of_the_last_use_is_left() -> None:
    pool = BufferPool(2**20)
    buffer = torch.full((2, 3), torch.nan)
    pool.give((0, 1), buffer)
    assert pool.take((0, 0), (2, 3), LIKE) is None
    assert pool.take((0, 1), (3, 2), LIKE) is None
    assert pool.take((0, 1), (2, 3), LIKE.double()) is None
    taken = pool.take((0, 1), (2, 3), LIKE)
    assert taken is not None
    assert taken.data_ptr() == buffer.data_ptr()
    assert torch.equal(taken, torch.zeros(2, 3))
    assert pool.take((0, 1), (2, 3), LIKE) is None


def test_the_buffers_that_are_free_for_longest_are_dropped() -> None:
    pool = BufferPool(3 * LIKE.nbytes)
    for layer in range(5):
        pool.give((0, layer), torch.zeros(1))
    held = [pool.take((0, layer), (1,), LIKE) is not None for layer in range(5)]
    assert held == [False, False, True, True, True]
    pool.give((0, 0), torch.zeros(1))
    pool.clear()
    assert pool.take((0, 0), (1,), LIKE) is None


@pytest.mark.parametrize("method", ["speculative", "top-k-tree"])
def test_engines_write_the_same_text_with_a_pool(method: str) -> None:
    """Rows that leave and join, several times."""
    prompts, texts = ragged_prompts([9, 3, 14, 60, 5]), []
    for make in (pooled, lambda seed: tiny("llama", seed)):
        engine = engine_of(make(0), make(1), method, 3, max_batch_size=2)
        texts += [token_ids(engine.generate(prompts, greedy(20))) for _ in range(2)]
    assert texts[0] == texts[1] == texts[2] == texts[3]
