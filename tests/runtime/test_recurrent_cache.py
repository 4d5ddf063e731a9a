"""The cache of recurrent models: what snapshots do not reach is read again, rows come and go, and
wrong caches are found.

Legend: B rows.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from real_tokenizers import tokenizer
from scheduled_requests import finish
from tiny_models import (
    UniformDrafter,
    byte_tokenizer,
    engine_of,
    greedy,
    ragged_prompts,
    tiny,
    token_ids,
)
from tiny_recurrent import tiny_recurrent, tiny_recurrent_module
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

import outrider
from outrider.core import Budget, Context, Draft, Lengths
from outrider.core.errors import (
    IncompatibleError,
    OutOfMemoryError,
    OutriderWarning,
    UnsupportedModelError,
)
from outrider.drafters import ModelDrafter
from outrider.engine.admission import RowExtent
from outrider.runtime import RecurrentCache, RecurrentModel, load_model
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.hf.recurrences import ChunkScan
from outrider.testing import SoftmaxDistribution, check_model, enumerate_round
from outrider.verifiers import Rejection

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5]]


@pytest.fixture(scope="module", params=["mamba2", "recurrent_gemma"])
def target(request: pytest.FixtureRequest) -> RecurrentModel:
    return tiny_recurrent(request.param, name="target")


def started(target: RecurrentModel, prompts: list[list[int]] = PROMPTS) -> RecurrentCache:
    num = len(prompts)
    context = Context.start(prompts, SoftmaxDistribution(), [9] * num, range(num))
    cache = target.start(context)
    assert isinstance(cache, RecurrentCache)
    return cache


def next_logits(target: RecurrentModel, cache: RecurrentCache) -> torch.Tensor:
    return target.extend(cache, torch.full((cache.num_rows, 1), 7))


def expect(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_what_snapshots_do_not_reach_is_read_again(target: RecurrentModel) -> None:
    """Rows rolled back into their prompts, to different lengths, and one to nothing; the fourth
    row, which is not rolled back, keeps its state."""
    prompts = [*PROMPTS[:2], [8, 8, 8], [1, 2, 3]]
    cache = started(target, prompts)
    cache.rollback(Lengths.of([2, 1, 0, 9]))
    assert cache.unread == [True, True, False, False]
    wanted = started(target, [[3, 1, 0], [9, 0], [0], [1, 2, 3]])
    expect(next_logits(target, cache), next_logits(target, wanted))
    assert not any(cache.unread)


@torch.inference_mode()
def test_a_snapshot_is_returned_to(target: RecurrentModel) -> None:
    cache = started(target)
    snapshot, wanted = cache.snapshot(), next_logits(target, cache)
    for step in range(4):
        target.extend(cache, torch.full((3, 2), step))
        cache.append(Lengths.of([2, 1, 0]))
    cache.rollback(Lengths.of([3, 2, 0]))
    cache.restore(snapshot)
    assert cache.lengths == [4, 2, 0]
    assert torch.equal(next_logits(target, cache), wanted)


@torch.inference_mode()
def test_a_row_may_keep_no_token_of_the_first_pass(target: RecurrentModel) -> None:
    cache = started(target, [[5], [6]])
    target.extend(cache, torch.tensor([[1, 2], [3, 4]]))
    cache.append(Lengths.of([0, 2]))
    wanted = [target.logits_after([], [7]), target.logits_after([3, 4], [7])]
    expect(next_logits(target, cache)[:, 0], torch.stack(wanted))


@torch.inference_mode()
def test_a_matrix_lstm_rolls_back_in_float16() -> None:
    """Where the gates of tokens that are not kept must not overflow."""
    target = RecurrentModel(tiny_recurrent_module("xlstm", std=0.1).half())
    cache = started(target, [[3, 1], [5, 9]])
    target.extend(cache, torch.tensor([[1, 2, 4], [5, 6, 7]]))
    cache.append(Lengths.of([1, 2]))
    found_BV = next_logits(target, cache)[:, 0]
    for row, tokens in enumerate([[3, 1], [5, 5, 6]]):
        wanted_V = target.logits_after(tokens, [7])
        torch.testing.assert_close(found_BV[row], wanted_V, rtol=0.05, atol=0.05)


@torch.inference_mode()
def test_rows_that_leave_and_join_keep_their_states(target: RecurrentModel) -> None:
    """Also a row that has not read anything, and a rollback after rows have left."""
    cache = started(target)
    target.extend(cache, torch.tensor([[1, 2], [3, 4], [5, 6]]))
    cache.append(Lengths.of([2, 1, 0]))
    cache.keep([2, 1])
    cache.context.keep([2, 1])
    cache.rollback(Lengths.of([0, 2]))
    expect(next_logits(target, cache), next_logits(target, started(target, [[5], [9, 2, 6]])))
    other = started(target, [[4], [7, 7, 7]])
    target.join(cache, other)
    wanted = started(target, [[5], [9, 2, 6], [4], [7, 7, 7]])
    expect(next_logits(target, cache), next_logits(target, wanted))
    empty = started(target, [[1], [2]])
    target.join(empty, started(target, [[3, 3]]))
    expect(next_logits(target, empty), next_logits(target, started(target, [[1], [2], [3, 3]])))


@torch.inference_mode()
def test_rows_that_are_to_be_read_again_leave_and_join(target: RecurrentModel) -> None:
    """They are read again in their new places."""
    cache = started(target, [[3, 1, 4, 1, 5], [9, 2, 6], [8, 8, 8]])
    cache.rollback(Lengths.of([9, 9, 1]))
    cache.keep([0, 2])
    cache.context.keep([0, 2])
    assert cache.unread == [False, True]
    other = started(target, [[4, 4, 4], [7, 7, 7]])
    other.rollback(Lengths.of([1, 9]))
    target.join(cache, other)
    cache.context.join(other.context)
    assert cache.unread == [False, True, True, False]
    wanted = started(target, [[3, 1, 4, 1, 5], [8, 0], [4, 0], [7, 7, 7]])
    expect(next_logits(target, cache), next_logits(target, wanted))


@torch.inference_mode()
def test_rows_that_move_roll_back_to_their_own_snapshots(target: RecurrentModel) -> None:
    """Their passes began at other lengths than those of the rows in whose places they are."""
    cache = started(target, [[3, 1], [9, 2, 6, 5], [8]])
    for tokens in ([[1, 2], [3, 4], [5, 6]], [[7, 7], [8, 8], [9, 9]]):
        target.extend(cache, torch.tensor(tokens))
        cache.append(2)
    cache.keep([0, 2])
    cache.context.keep([0, 2])
    cache.rollback(Lengths.of([4, 3]))
    assert cache.unread == [False, False]
    wanted = started(target, [[3, 1, 2, 7, 0], [5, 6, 9, 0]])
    expect(next_logits(target, cache), next_logits(target, wanted))


@torch.inference_mode()
def test_snapshots_are_dropped_once_tokens_are_committed(target: RecurrentModel) -> None:
    """A cache under plain decoding holds two states, whatever the number of rounds; one that drafts
    n tokens alone holds n + 1."""
    cache = started(target, [[1, 2, 3]])
    context = cache.context
    sizes = []
    for _ in range(5):
        target.score(cache, Draft.chain(context.root_B[:, None], None, None, "chosen"))
        sizes.append(cache.state_bytes())
        cache.append(1)
        context.append(torch.tensor([[4]]), Lengths.of([1]))
    state, _ = cache.pass_bytes()
    assert sizes == [2 * state] * 5
    for num in range(1, 5):
        target.extend(cache, torch.tensor([[4]]))
        cache.append(1)
        _, inputs = cache.pass_bytes()
        assert cache.state_bytes() == (num + 1) * state + num * inputs


def test_states_stay_below_the_bound(
    target: RecurrentModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the memory of one row or two, outputs are the same, and no more is held in any forward
    pass; half of one row's is refused."""
    draft = tiny_recurrent("mamba2", seed=1, name="draft")
    free = token_ids(engine_of(target, draft).generate(PROMPTS, greedy(6)))
    memory = engine_of(target, draft, max_memory="1GB")._memory
    assert memory is not None
    alone = memory.final(1, RowExtent(5, 11))
    with pytest.raises(OutOfMemoryError, match="raise it"):
        engine_of(target, draft, max_memory=alone // 2).generate(PROMPTS, greedy(6))
    held: list[int] = []
    run = RecurrentModel.forward

    def spy(self: RecurrentModel, batch: ForwardBatch) -> Any:
        output = run(self, batch)
        if self.plan.memory_budget is not None:
            held.append(self.plan.memory_budget.held())
        return output

    monkeypatch.setattr(RecurrentModel, "forward", spy)
    for bound in (alone, int(3.5 * alone)):
        engine = engine_of(target, draft, max_memory=bound)
        assert token_ids(engine.generate(PROMPTS, greedy(6))) == free
        assert 0 < max(held) <= bound


def test_a_hybrids_batch_grows_up_to_the_bound() -> None:
    """KV buffers are counted of the attention layers only: growing, they need no more than was
    reserved."""
    target = tiny_recurrent("recurrent_gemma", name="target")
    prompts = ragged_prompts([50, 49, 48, 47])
    free = token_ids(engine_of(target).generate(prompts, greedy(17)))
    memory = engine_of(target, max_memory="1GB")._memory
    assert memory is not None
    extent = RowExtent(50, 67)
    bound = memory.final(2, extent) + memory.first(2, extent)
    engine = engine_of(target, max_memory=bound)
    assert token_ids(engine.generate(prompts, greedy(17))) == free


@pytest.mark.parametrize("method", ["slem", "tli"])
def test_snapshots_of_a_draft_model_with_its_own_tokens(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are dropped once tokens are committed; and when rows join, which drops all of them, the
    states are computed from the committed tokens: the draft model drafts what it drafts for a row
    alone."""
    words = tokenizer("byte")
    settings = {"vocab_size": len(words)}
    target = RecurrentModel(tiny_recurrent_module("mamba2", **settings).double(), words, "target")
    module = tiny_recurrent_module("mamba2", **settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    draft = RecurrentModel(module.double(), words, "draft")
    engine = engine_of(target, draft, method, 4)
    prompts = ragged_prompts([9, 12, 5])
    alone = [engine.generate([prompt], greedy(40))[0].stats for prompt in prompts]
    assert 0 < sum(stats.accepted for stats in alone) < sum(stats.drafted for stats in alone)

    passes: list[int] = []
    drop = RecurrentCache._drop_passes

    def spy(self: RecurrentCache) -> None:
        drop(self)
        passes.append(len(self._passes))

    monkeypatch.setattr(RecurrentCache, "_drop_passes", spy)
    scheduler = engine.new_scheduler()
    ids = []
    for prompt in prompts:
        ids.append(scheduler.add(engine.request(prompt, greedy(40))))
        for _ in range(5):
            scheduler.step()
    rows = finish(scheduler, len(ids))
    assert [rows[each].stats.accepted for each in ids] == [stats.accepted for stats in alone]
    assert max(passes) <= 5  # the draft model reads two tokens and drafts four


def test_trees_are_refused_by_name(target: RecurrentModel) -> None:
    small = tiny_recurrent("mamba2", seed=1, name="draft")
    for draft in (small, tiny("llama", seed=1, name="draft")):
        with pytest.raises(IncompatibleError, match=r"drafts trees, but target .*chains only"):
            engine_of(target, draft, method="top-k-tree")
    with pytest.raises(IncompatibleError, match=r"draft \(Mamba2ForCausalLM\) scores chains only"):
        engine_of(tiny("llama"), small, method="top-k-tree")
    cache = started(target)
    draft = UniformDrafter(101, width=2)
    context = cache.context
    tree = draft.propose(draft.start(context), context, Budget(3), context.rng)
    with pytest.raises(IncompatibleError, match="cannot branch"):
        target.score(cache, tree)


def test_what_needs_other_caches_is_refused_by_name(target: RecurrentModel) -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent layers, whose"):
        engine_of(target, method="early-exit")
    with pytest.warns(OutriderWarning, match=r"no prefix reuse: target is recurrent"):
        engine = engine_of(target, prefix_cache="1MiB")
    assert token_ids(engine.generate(PROMPTS, greedy(3)))


def test_a_folder_is_loaded_and_run(tmp_path: Path) -> None:
    """Also with our kernels for linear layers, whose weights stay as the layers read them."""
    module = tiny_recurrent_module("qwen3_next", vocab_size=300)
    module.save_pretrained(tmp_path)
    byte_tokenizer(num_tokens=280).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="recurrent layers, whose bits"):
        outrider.load(str(tmp_path), dtype="float32", method="plain", exact=True)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    assert isinstance(model, RecurrentModel)
    prompts = ragged_prompts([4, 9], 280)
    wanted = token_ids(engine_of(RecurrentModel(module)).generate(prompts, greedy(8)))
    for method in ("prompt-lookup", "suffix"):
        engine = engine_of(model, method=method)
        assert token_ids(engine.generate(prompts, greedy(8))) == wanted
    with pytest.warns(OutriderWarning, match="recurrent model, which is not compiled yet"):
        loaded = outrider.load(str(tmp_path), dtype="float32", method="plain", compile="auto")
    assert token_ids(loaded.generate(prompts, greedy(8))) == wanted


def test_a_round_has_exactly_the_targets_distribution() -> None:
    """ENUM: a Mamba-2 of three tokens in both roles, in float64 arithmetic of the rule."""

    class Doubled(RecurrentModel):
        """With logits in float64, as enumeration wants them."""

        def score(self, cache: Any, draft: Draft) -> Any:
            scores = super().score(cache, draft)
            return type(scores)(scores.logits_BNV.double())

    with torch.inference_mode():
        target = Doubled(tiny_recurrent_module("mamba2", vocab_size=3, std=0.2))
        draft = ModelDrafter(tiny_recurrent("mamba2", seed=1, vocab_size=3, std=0.2), 3)
        done = enumerate_round(target, draft, Rejection(), 1)
    assert done.total_variation < 1e-5


@pytest.mark.parametrize("mutant", ["states are not cloned", "padding leaks", "no replay"])
def test_wrong_caches_are_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MUT."""
    if mutant == "no replay":
        monkeypatch.setattr(RecurrentCache, "_replay", lambda *args: None)
    elif mutant == "padding leaks":
        run = ChunkScan.run
        monkeypatch.setattr(
            ChunkScan, "run", lambda self, state, inputs, kept_B: run(self, state, inputs, None)
        )
    else:
        original = ChunkScan.run

        def in_place(self: ChunkScan, state: Any, inputs: Any, kept_B: Any) -> Any:
            output, after = original(self, state, inputs, kept_B)
            state[0].copy_(after[0])
            return output, state

        monkeypatch.setattr(ChunkScan, "run", in_place)
    with torch.inference_mode(), pytest.raises(AssertionError, match="differ from scoring"):
        check_model(tiny_recurrent("mamba2", vocab_size=7), 7, trees=False, atol=1e-4)


def test_a_layer_whose_recurrence_is_out_of_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a version of ``transformers`` with other names, where states would begin empty in each
    forward pass."""
    monkeypatch.setattr("outrider.runtime.hf.recurrent_views._FUNCTIONS", {})
    model = tiny_recurrent("mamba2")
    with pytest.raises(UnsupportedModelError, match="layer 0 computes its recurrent state by"):
        engine_of(model).generate(PROMPTS, greedy(2))


def test_a_short_scan_equals_the_models_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a state that is not empty, with several groups of heads."""
    B, N, H, P, G, S = 2, 7, 4, 8, 2, 16
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, step, A = random(B, N, H, P), random(B, N, H).exp(), -random(H).exp()
    inputs = x, step, random(B, N, G, S), random(B, N, G, S)
    state = (random(B, H, P, S),)
    scan = ChunkScan(mamba2_chunk_scan, 16, A, random(H))
    for kept_B in (None, torch.tensor([0, 3])):
        short, (after,) = scan.run(state, inputs, kept_B)
        with monkeypatch.context() as patched:
            patched.setattr("outrider.runtime.hf.recurrences.MOST_SHORT", 0)
            wanted, (wanted_after,) = scan.run(state, inputs, kept_B)
        torch.testing.assert_close(short, wanted, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(after, wanted_after, rtol=1e-4, atol=1e-4)
        assert kept_B is None or torch.equal(after[0], state[0][0])
