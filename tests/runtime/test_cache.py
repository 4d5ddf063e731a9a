"""The KV buffers: growth, memory, rollback, rows that come and go, the limit, and running out of
memory.

Legend: B rows, H heads, N columns, C width of a head, S slots.
"""

import pytest
import torch
from tiny_models import engine_of, full_logits, greedy, ragged_prompts, tiny, token_ids
from torch import Tensor

from outrider import Engine, Sampling
from outrider.core import Acceptance, Context, Draft, Lengths, Verdict, keep_accepted
from outrider.core.errors import OutOfMemoryError
from outrider.runtime import HFModel, KVCache
from outrider.runtime.kv_cache import cache as cache_module
from outrider.testing import SoftmaxDistribution

H, C = 2, 3


def context_of(lengths: list[int]) -> Context:
    prompts = ragged_prompts(lengths)
    return Context.start(prompts, SoftmaxDistribution(), [0] * len(prompts), range(len(prompts)))


def kv_cache(lengths: list[int], limit: int = 10**6, num_layers: int = 1) -> KVCache:
    """An empty cache for rows of these lengths."""
    return KVCache(context_of(lengths), num_layers, limit)


def fill(cache: KVCache, lengths: list[int]) -> Tensor:
    """Writes that many distinguishable columns into each row; returns them, (B, H, N, C)."""
    B, N = cache.num_rows, max(lengths)
    new_BHNC = torch.arange(B * H * N * C).float().view(B, H, N, C) + 1
    cache.begin(N)
    cache.update(new_BHNC, -new_BHNC, 0)
    cache.append(Lengths.of(lengths))
    return new_BHNC


def held(cache: KVCache, row: int) -> Tensor:
    """The committed keys of a row, (H, S, C)."""
    buffer = cache.keys[0]
    assert buffer is not None
    return buffer[row, :, : int(cache.length_B[row])]


@pytest.mark.parametrize("num", [1, 2, 3])
def test_passes_over_the_first_rows_leave_the_others_alone(num: int) -> None:
    cache = kv_cache([9, 9, 9])
    first = fill(cache, [4, 2, 3])
    cache.long = [True, False, True]
    with cache.leading(num):
        assert cache.num_rows == num
        assert len(cache.long) == num
        new = fill(cache, [100] * num)  # which grows the buffers of all rows
    assert cache.lengths == [n + 100 * (row < num) for row, n in enumerate([4, 2, 3])]
    assert cache.length_B.tolist() == cache.lengths
    assert cache.long == [True, False, True]
    for row, length in enumerate([4, 2, 3]):
        wanted = [first[row, :, :length], *([new[row]] if row < num else [])]
        assert torch.equal(held(cache, row), torch.cat(wanted, 1))


def test_a_pass_over_the_first_rows_that_fails_leaves_all_rows() -> None:
    cache = kv_cache([9, 9])
    fill(cache, [4, 2])
    with pytest.raises(RuntimeError, match="broken"), cache.leading(1):
        raise RuntimeError("broken")
    assert cache.lengths == [4, 2]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 100, 128, 129, 500, 1025])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_memory_is_within_twice_what_the_length_needs(length: int, num_rows: int) -> None:
    """Within 2x, and one KV buffer of slack: the first one, 64 slots long."""
    cache = kv_cache([length] * num_rows)
    fill(cache, [length] * num_rows)
    per_token = 2 * H * C * 4
    assert num_rows * length * per_token <= cache.num_bytes()
    assert cache.num_bytes() <= num_rows * per_token * (2 * length + 64)


@pytest.mark.parametrize("num_new", [1, 5])
def test_memory_while_a_text_grows(num_new: int) -> None:
    """The bound holds at every length on the way, and the KV buffer is rarely copied."""
    cache = kv_cache([4, 4])
    fill(cache, [4, 4])
    addresses = set()
    while cache.lengths[0] < 700:
        length = cache.lengths[0] + num_new
        cache.begin(num_new)
        cache.update(torch.ones(2, H, num_new, C), torch.ones(2, H, num_new, C), 0)
        cache.append(num_new)
        assert cache.num_bytes() <= 2 * 2 * H * C * 4 * (2 * length + 64)
        assert cache.keys[0] is not None
        addresses.add(cache.keys[0].shape[2])
    assert addresses == {64, 128, 256, 512, 1024}


def test_buffers_stop_growing_at_the_limit() -> None:
    cache = kv_cache([70], limit=100)
    fill(cache, [70])
    assert cache.keys[0] is not None
    assert cache.keys[0].shape[2] == 100
    assert cache.get_max_length() == 100


def test_growth_keeps_what_was_written() -> None:
    cache = kv_cache([60, 60])
    new_BHNC = fill(cache, [60, 60])
    cache.begin(10)
    keys, values = cache.update(torch.zeros(2, H, 10, C), torch.zeros(2, H, 10, C), 0)
    assert keys.shape == values.shape == (2, H, 70, C)
    torch.testing.assert_close(keys[:, :, :60], new_BHNC)
    torch.testing.assert_close(values[:, :, :60], -new_BHNC)
    assert cache.get_seq_length() == 60
    assert cache.get_mask_sizes(10) == (70, 0)


def test_ragged_writes_equal_uniform_ones_row_by_row() -> None:
    """The scattered write and the contiguous one put the same things into the same places."""
    lengths = [3, 9, 1]
    ragged = kv_cache(lengths)
    fill(ragged, lengths)
    new_BHNC = torch.randn(3, H, 4, C, generator=torch.Generator().manual_seed(0))
    ragged.begin(4)
    ragged.update(new_BHNC, 2 * new_BHNC, 0)
    assert ragged.span == 13
    for row, length in enumerate(lengths):
        alone = kv_cache([length])
        alone.context = ragged.context
        fill(alone, [length])
        alone.begin(4)
        alone.update(new_BHNC[row : row + 1], 2 * new_BHNC[row : row + 1], 0)
        for mine, theirs in ((ragged.keys, alone.keys), (ragged.values, alone.values)):
            a, b = mine[0], theirs[0]
            assert a is not None
            assert b is not None
            torch.testing.assert_close(a[row, :, length : length + 4], b[0, :, length : length + 4])


def test_rollback_moves_the_counter_only() -> None:
    """Five drafted, two accepted: root and two are kept, the rest is overwritten by the next."""
    cache = kv_cache([5, 8])
    old_BHNC = fill(cache, [4, 7])
    cache.begin(6)
    drafted_BHNC = 1000 + torch.arange(2 * H * 6 * C).float().view(2, H, 6, C)
    cache.update(drafted_BHNC, drafted_BHNC, 0)
    tokens_BN = torch.zeros(2, 6, dtype=torch.int64)
    draft = Draft.chain(tokens_BN, torch.ones(2, 6, dtype=torch.bool), None, "chosen")
    path_BD = torch.arange(1, 6).expand(2, 5)
    num_accepted_B = torch.tensor([2, 0])
    verdict = Verdict(path_BD, num_accepted_B, torch.zeros(2, dtype=torch.int64))
    keep_accepted(cache, draft, verdict.read())
    assert cache.length_B.tolist() == [7, 8]
    torch.testing.assert_close(held(cache, 0)[:, :4], old_BHNC[0, :, :4])
    torch.testing.assert_close(held(cache, 0)[:, 4:], drafted_BHNC[0, :, :3])
    torch.testing.assert_close(held(cache, 1)[:, 7:], drafted_BHNC[1, :, :1])


def test_a_path_of_a_tree_is_gathered() -> None:
    cache = kv_cache([3, 3])
    fill(cache, [2, 2])
    cache.begin(5)
    nodes_BHNC = 1000 + torch.arange(2 * H * 5 * C).float().view(2, H, 5, C)
    cache.update(nodes_BHNC, nodes_BHNC, 0)
    parents_BN = torch.tensor([[-1, 0, 0, 2, 1]] * 2)
    mask_BN = torch.ones(2, 5, dtype=torch.bool)
    draft = Draft(torch.zeros(2, 5, dtype=torch.int64), parents_BN, mask_BN, None, "chosen")
    path_BD = torch.tensor([[2, 3, 4, 4], [1, 4, 4, 4]])
    verdict = Verdict(path_BD, torch.tensor([2, 2]), torch.zeros(2, dtype=torch.int64))
    keep_accepted(cache, draft, verdict.read())
    torch.testing.assert_close(held(cache, 0)[:, 2:], nodes_BHNC[0][:, [0, 2, 3]])
    torch.testing.assert_close(held(cache, 1)[:, 2:], nodes_BHNC[1][:, [0, 1, 4]])


def test_rows_leave_and_join() -> None:
    cache = kv_cache([3, 9, 1, 6])
    rows = fill(cache, [3, 9, 1, 6])
    cache.keep([3, 1])
    assert cache.lengths == cache.length_B.tolist() == [6, 9]
    torch.testing.assert_close(held(cache, 0), rows[3, :, :6])
    torch.testing.assert_close(held(cache, 1), rows[1, :, :9])

    newcomers = kv_cache([70, 2])
    new_rows = fill(newcomers, [70, 2])
    cache.join(newcomers)
    assert cache.lengths == cache.length_B.tolist() == [6, 9, 70, 2]
    torch.testing.assert_close(held(cache, 0), rows[3, :, :6])
    torch.testing.assert_close(held(cache, 1), rows[1, :, :9])
    torch.testing.assert_close(held(cache, 2), new_rows[0, :, :70])
    torch.testing.assert_close(held(cache, 3), new_rows[1, :, :2])


def test_rows_join_that_have_nothing_cached() -> None:
    """Prompts of a single token: the root is not cached."""
    cache = kv_cache([4])
    rows = fill(cache, [3])
    cache.join(kv_cache([1, 1]))
    assert cache.lengths == cache.length_B.tolist() == [3, 0, 0]
    cache.begin(1)
    new_BHNC = torch.full((3, H, 1, C), 7.0)
    cache.update(new_BHNC, new_BHNC, 0)
    cache.append(1)
    torch.testing.assert_close(held(cache, 0)[:, :3], rows[0, :, :3])
    assert bool((held(cache, 1) == 7).all())
    first = kv_cache([1])
    first.join(kv_cache([1]))
    assert first.num_bytes() == 0


def test_rows_without_tokens_take_the_place_of_others() -> None:
    """KV buffers do not grow for rows that join without a token, and such a row may be moved before
    they do. A former row may have left a NaN where it goes."""
    cache = kv_cache([4, 4])
    rows = fill(cache, [3, 2])
    assert cache.values[0] is not None
    cache.values[0][0] = torch.nan
    cache.join(kv_cache([1, 1, 1]))
    cache.keep([4, 1, 3])
    assert cache.lengths == cache.length_B.tolist() == [0, 2, 0]
    torch.testing.assert_close(held(cache, 1), rows[1, :, :2])
    cache.begin(1)
    new_BHNC = torch.full((3, H, 1, C), 7.0)
    _, values_BHNC = cache.update(new_BHNC, new_BHNC, 0)
    cache.append(1)
    assert bool(values_BHNC.isfinite().all())
    assert [held(cache, row)[0, -1, 0] for row in range(3)] == [7, 7, 7]


@pytest.mark.parametrize(
    ("free", "wanted"),
    [
        (10_000, "8 rows x 64 tokens need 0.1 MiB; 0.0 MiB are at hand, which fit 0 rows"),
        (100_000, "8 rows x 64 tokens need 0.1 MiB; 0.1 MiB are at hand, which fit 6 rows"),
        (600_000, "8 rows x 1024 tokens need 2.0 MiB; 1.6 MiB are at hand, which fit 6 rows"),
        (1_500_000, "8 rows x 2048 tokens need 4.0 MiB; 3.4 MiB are at hand, which fit 6 rows"),
    ],
)
def test_out_of_memory_says_what_was_wanted_and_what_fits(
    monkeypatch: pytest.MonkeyPatch, free: int, wanted: str
) -> None:
    """A token of a row takes 256 bytes: keys and values, 2 layers, 2 heads of 8 floats. Refused
    before the first KV buffer that would not fit with its sisters, not when the last one does
    not."""
    monkeypatch.setattr(cache_module, "free_bytes", lambda device: free)
    target = tiny(max_position_embeddings=4096)
    engine = engine_of(target)
    with pytest.raises(OutOfMemoryError) as caught:
        engine.generate(ragged_prompts([1100] * 8), greedy(4))
    message = str(caught.value)
    assert wanted in message
    assert "\n" not in message
    assert isinstance(caught.value, MemoryError)

    monkeypatch.undo()
    assert len(engine.generate(ragged_prompts([1100]), greedy(4))[0].token_ids) == 4


def test_a_short_cache_is_made_without_asking_for_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each review makes one, and reading the limits of control groups takes as long as its pass. A
    cache that takes more memory asks."""
    asked: list[torch.device] = []

    def free_bytes(device: torch.device) -> int:
        asked.append(device)
        return 2**40

    monkeypatch.setattr(cache_module, "free_bytes", free_bytes)
    model, context = tiny(), context_of([9, 9])
    tokens_BN = context.tokens_BT[:, :6]
    cache = model.short_cache(context, 6)
    assert cache is not None
    logits_BNV = model.extend(cache, tokens_BN)
    assert not asked
    granted = 2 * model.num_layers * H * C * 4 * 64  # of one row of two
    cache = KVCache(context, model.num_layers, model.limit, granted=granted)
    assert torch.equal(model.extend(cache, tokens_BN), logits_BNV)
    assert asked


@pytest.mark.parametrize("speculative", [False, True])
def test_rows_that_fill_the_context_finish_and_leave_their_neighbours_alone(
    speculative: bool,
) -> None:
    limit = 40
    target = tiny("llama", max_position_embeddings=limit)
    draft = tiny("llama", seed=1, max_position_embeddings=limit) if speculative else None
    same = HFModel(target.module) if speculative else None
    prompts = ragged_prompts([limit - 1, 5, limit - 7, limit - 2, 12])
    sampling = [greedy(n) for n in (100, 10, 100, 1, 28)]
    for model in (draft, same):
        results = engine_of(target, model, γ=64).generate(prompts, sampling)
        assert [len(r.token_ids) for r in results] == [1, 10, 7, 1, 28]
        reasons = [r.finish_reason for r in results]
        assert reasons == ["context", "length", "context", "length", "length"]
        for prompt, result in zip(prompts, results, strict=True):
            full = list(prompt) + list(result.token_ids)
            wanted = full_logits(target.module, full).argmax(-1)[len(prompt) - 1 : -1]
            assert result.token_ids == tuple(wanted.tolist())


def test_the_target_s_context_counts() -> None:
    target = tiny(max_position_embeddings=64)
    draft = tiny(seed=1, max_position_embeddings=32)
    result = engine_of(target, draft).generate(ragged_prompts([20]), greedy(100))[0]
    assert (len(result.token_ids), result.finish_reason) == (44, "context")


def test_a_long_prompt_is_cached_in_several_passes() -> None:
    """1300 tokens go through in passes of bounded width, beside a short row."""
    target = tiny("mistral", max_position_embeddings=2048)
    prompts = ragged_prompts([1300, 7, 600])
    together = engine_of(target).generate(prompts, greedy(6))
    alone = [engine_of(target).generate([p], greedy(6))[0] for p in prompts]
    assert token_ids(together) == token_ids(alone)
    text = list(prompts[0]) + list(together[0].token_ids)
    wanted = full_logits(target.module, text).argmax(-1)[1299:-1]
    assert together[0].token_ids == tuple(wanted.tolist())


def test_memory_of_a_running_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine: what the target holds for equal rows at the end of a text."""
    sizes: list[int] = []
    commit = HFModel.commit

    def spy(self: HFModel, cache: KVCache, draft: Draft, verdict: Acceptance) -> None:
        commit(self, cache, draft, verdict)
        sizes.append(cache.num_bytes())

    monkeypatch.setattr(HFModel, "commit", spy)
    target = tiny(max_position_embeddings=1024)
    engine: Engine = engine_of(target, max_batch_size=4)
    engine.generate(ragged_prompts([100] * 4), Sampling(max_new_tokens=200, ignore_eos=True))
    per_token = 2 * target.num_layers * 2 * 8 * 4
    for step, size in enumerate(sizes):
        length = 100 + step
        assert 4 * per_token * length <= size <= 4 * per_token * (2 * length + 64)
