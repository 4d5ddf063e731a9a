"""``max_memory``: KV buffers stay below it in every round, requests wait, and no output changes.

Legend: B rows.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids
from tiny_ngrams import tiny_file
from tiny_seq2seq import tiny_seq2seq

from outrider import Engine, Sampling
from outrider.core.chain import _cached_arange, _cached_chain_tensors
from outrider.core.errors import InvalidParameterError, OutOfMemoryError
from outrider.core.rng import _spread
from outrider.core.tree import _cached_tree_tensors
from outrider.engine.admission import Reservation, parse_bytes
from outrider.engine.running_batch import RunningBatch
from outrider.runtime import HFModel, KVCache
from outrider.runtime.kv_cache.buffer_pool import Place
from outrider.runtime.kv_cache.footprint import Footprint
from outrider.sampling.truncate import per_row

LENGTHS = [9, 1, 17, 4, 4, 12, 30, 2, 60]
SAMPLING = [greedy(n) for n in (18, 25, 6, 30, 12, 21, 40, 3, 50)]


@pytest.fixture(scope="module")
def target() -> HFModel:
    return tiny("llama", 0, dtype=torch.float64, std=0.2)


@pytest.fixture(scope="module")
def draft() -> HFModel:
    return tiny("llama", 0, dtype=torch.float64, std=0.18)


def held(engine: Engine) -> int:
    """Bytes of all live KV buffers of an engine."""
    memory_budget = engine.target.plan.memory_budget
    assert memory_budget is not None
    return memory_budget.held()


@contextmanager
def watching(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Rows and bytes held after each round, and after each KV buffer's allocation."""
    seen: list[tuple[int, int]] = []
    step, allocate = RunningBatch.step, KVCache._allocate

    def spy_step(self: RunningBatch) -> object:
        events = step(self)
        seen.append((len(self.rows), held(engine)))
        return events

    def spy_allocate(
        self: KVCache, place: Place, shape: tuple[int, int, int, int], like: torch.Tensor
    ) -> torch.Tensor:
        buffer = allocate(self, place, shape, like)
        seen.append((0, held(engine) + buffer.nbytes))
        return buffer

    with monkeypatch.context() as patched:
        patched.setattr(RunningBatch, "step", spy_step)
        patched.setattr(KVCache, "_allocate", spy_allocate)
        yield seen


def least(engine: Engine, prompts: Sequence[list[int]]) -> int:
    """Bytes that the largest request needs when it runs alone."""
    memory = engine._memory
    assert memory is not None
    requests, _ = engine._builder.batch(prompts, SAMPLING)
    return max(memory.final(1, memory.extent(request)) for request in requests)


@pytest.mark.parametrize(
    "method",
    [
        "plain",
        "speculative",
        "top-k-tree",
        "mtad",
        "prompt-lookup",
        "hybrid",
        "early-exit",
        "staged",
        "dspark",
        "dflash-tree",
    ],
)
def test_buffers_stay_below_the_bound_and_outputs_are_the_same(
    target: HFModel, draft: HFModel, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for the largest request alone, for more than that, and for several."""
    prompts = ragged_prompts(LENGTHS)
    free = engine_of(target, draft, method).generate(prompts, SAMPLING)
    needed = least(engine_of(target, draft, method, max_memory="1GB"), prompts)
    for share in (1.0, 1.7, 4.0):
        bound = int(share * needed)
        engine = engine_of(target, draft, method, max_memory=bound)
        with watching(engine, monkeypatch) as seen:
            results = engine.generate(prompts, SAMPLING)
        assert token_ids(results) == token_ids(free)
        assert [list(result.prompt_ids) for result in results] == prompts
        assert max(size for _, size in seen) <= bound
        assert min(size for _, size in seen) > 0
        assert held(engine) == 0
        most = max(rows for rows, _ in seen)
        assert 1 <= most < len(prompts) if share < 4 else most > 1


@pytest.mark.parametrize(
    ("method", "draft_length"),
    [
        ("speculative", "heuristic:3"),
        ("specinfer", "heuristic:3"),
        ("staged", "heuristic"),
        ("speculative", "confidence:0.4"),
        ("ngram", "survival:0.5"),
    ],
)
def test_a_draft_length_policy_reserves_no_more_than_the_drafter(
    target: HFModel, draft: HFModel, method: str, draft_length: str
) -> None:
    """The wrapped drafter says how many nodes a draft has, as it does without the wrapper."""
    options = {"file": tiny_file()} if method == "ngram" else {}
    needs = []
    for length in ("fixed", draft_length):
        settings = {"max_memory": "1GB", "options": options, "draft_length": length}
        engine = engine_of(target, draft, method, 4, **settings)
        needs.append(least(engine, ragged_prompts(LENGTHS)))
    assert needs[1] == needs[0]


def test_kv_buffers_of_rows_that_have_left_stay_reserved(target: HFModel) -> None:
    """They are freed with those of the last row."""
    each = engine_of(target, max_memory="1GB")
    memory, rows = each._memory, [each.row(each.request([1, 2], greedy(9))) for _ in range(5)]
    assert memory is not None
    reservation = Reservation(memory)
    assert reservation.admit(0, rows[:4], 4) == 4
    assert reservation.admit(1, rows[4:], 1) == 1
    assert memory.reservations[reservation] >= memory.final(4, memory.extent(rows[0].request))


def test_rows_join_while_others_run(target: HFModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new row joins when another finishes; it does not wait for the whole batch."""
    prompts = ragged_prompts([20] + [5] * 12)
    sampling = [greedy(60)] + [greedy(4)] * 12
    free = engine_of(target).generate(prompts, sampling)
    engine = engine_of(target, max_memory=4 * 128 * Footprint.of(target).slot)
    with watching(engine, monkeypatch) as seen:
        results = engine.generate(prompts, sampling)
    assert token_ids(results) == token_ids(free)
    rows = [rows for rows, _ in seen if rows]
    assert 1 < max(rows) < 13
    assert len(rows) == 60  # the short requests run one after the other beside the long one


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_sources_are_counted(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny_seq2seq(family), tiny_seq2seq(family, std=0.19)
    prompts = ragged_prompts(LENGTHS)
    bound = int(1.5 * least(engine_of(target, draft, max_memory="1GB"), prompts))
    engine = engine_of(target, draft, max_memory=bound)
    with watching(engine, monkeypatch) as seen:
        engine.generate(prompts, SAMPLING)
    assert 0 < max(size for _, size in seen) <= bound
    assert held(engine) == 0


def test_a_request_that_exceeds_the_bound_alone_is_refused_before_any_runs(
    target: HFModel, draft: HFModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(target, draft, max_memory=100_000)
    with watching(engine, monkeypatch) as seen, pytest.raises(OutOfMemoryError) as caught:
        engine.generate(ragged_prompts([3, 60]), greedy(50))
    assert seen == []
    message = str(caught.value)
    assert "a prompt of 60 tokens with up to 50 new ones needs 147,456 bytes" in message
    assert "max_memory is 100,000 bytes" in message
    assert "lower max_new_tokens, shorten the prompt, or store KV buffers with kv_dtype" in message
    with pytest.raises(OutOfMemoryError):
        engine.stream([1] * 60, greedy(50))
    assert len(engine.generate(ragged_prompts([3]), greedy(5))[0].token_ids) == 5


def test_streams_share_the_bound_and_give_back(
    target: HFModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for two of these streams; a third one waits until both have ended. The thread
    that asks for its first event runs their rounds."""
    sampling = Sampling(max_new_tokens=50, ignore_eos=True)
    roomy = engine_of(target, max_memory="1GB")
    memory = roomy._memory
    assert memory is not None
    extent = memory.extent(roomy.request([1, 2, 3], sampling))
    bound = memory.final(2, extent) + memory.first(1, extent)
    engine = engine_of(target, max_memory=bound)
    first, second, third = (engine.stream([1, 2, 3], sampling) for _ in range(3))
    with watching(engine, monkeypatch) as seen:
        next(first)
        next(second)
        next(third)
        assert held(engine) > 0
        first.close()
        assert [len(list(stream)) for stream in (second, third)] == [49, 49]
    assert 0 < max(size for _, size in seen) <= bound
    assert max(rows for rows, _ in seen) == 2
    assert held(engine) == 0
    assert len(engine.generate([[1, 2, 3]], sampling)[0].token_ids) == 50


def test_a_reservation_that_is_too_low_does_not_break_the_bound(
    target: HFModel, draft: HFModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a drafter declares less than it needs, the KV buffers themselves keep the bound."""
    bound = 128 * 1024
    engine = engine_of(target, draft, max_memory=bound)
    assert engine._memory is not None
    monkeypatch.setattr(type(engine._memory), "final", lambda self, rows, extent: 0)
    with (
        watching(engine, monkeypatch) as seen,
        pytest.raises(OutOfMemoryError, match="raise max_memory"),
    ):
        engine.generate(ragged_prompts([60] * 3), greedy(50))
    assert 0 < max(size for _, size in seen) <= bound


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (5000, 5000),
        ("5000", 5000),
        ("64 KiB", 65536),
        ("1.5MiB", 3 * 2**19),
        ("512M", 2**29),
        ("2GB", 2 * 10**9),
        ("1tib", 2**40),
    ],
)
def test_sizes_with_units_are_parsed(value: int | str, num_bytes: int) -> None:
    assert parse_bytes(value) == num_bytes


@pytest.mark.parametrize("value", ["", "much", "GB", "-1GB", "0", 0, -5, True, 1.5, "1 XB"])
def test_other_sizes_are_refused(value: object) -> None:
    with pytest.raises(InvalidParameterError, match="such as 512MiB or 2GB"):
        engine_of(tiny(), max_memory=value)


@pytest.mark.parametrize("method", ["speculative", "top-k-tree", "suffix"])
def test_no_tensor_is_leaked_as_requests_come_and_go(
    target: HFModel, draft: HFModel, method: str
) -> None:
    """There are as many tensors after 12 calls as after 4. Rows join and leave in every call."""
    engine = engine_of(target, draft, method, max_batch_size=3)
    if method == "suffix":  # its corpus of outputs is bounded, but not full yet
        engine = engine_of(target, None, method, options={"corpus_tokens": 0}, max_batch_size=3)
    prompts = ragged_prompts([9, 1, 17, 4, 12])
    counts = []
    for call in range(12):
        engine.generate(prompts, [Sampling(max_new_tokens=5 + (call + i) % 7) for i in range(5)])
        if call in (3, 11):
            for kept in (
                _cached_chain_tensors,
                _cached_arange,
                _cached_tree_tensors,
                per_row,
                _spread,
            ):  # by shape, and bounded
                kept.cache_clear()
            gc.collect()
            objects = gc.get_objects()
            counts.append(sum(isinstance(each, torch.Tensor | KVCache) for each in objects))
    assert counts[0] == counts[1]
