"""The decoders of encoder-decoders run by programs as they run eagerly: sources of any length,
rollback, trees, rows that join and leave."""

from functools import partial
from typing import Any

import pytest
import torch
from interpreted_graphs import interpreted, untraced
from tiny_models import engine_of, greedy, ragged_prompts, token_ids, uniform_method
from tiny_seq2seq import tiny_seq2seq
from torch import Tensor, nn

from outrider import Engine, Sampling
from outrider.core import Context
from outrider.core.errors import OutriderWarning
from outrider.runtime import Seq2SeqModel, runner
from outrider.runtime.executors.compile_cache import Program, compiled_program
from outrider.runtime.executors.compiled import CompiledExecutor, Compiler
from outrider.runtime.executors.eager import EagerExecutor
from outrider.runtime.executors.fused_draft import GreedyDraft
from outrider.runtime.executors.parity import compare
from outrider.runtime.executors.prepare import stages
from outrider.runtime.executors.traced import ChainForward, TreeForward
from outrider.runtime.executors.traced_cache import halves
from outrider.runtime.executors.traced_sources import SourcesForward
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.kernels import build, use_kernels
from outrider.runtime.kv_cache.cross_attention import Seq2SeqCache
from outrider.runtime.prefill import unsampled_context
from outrider.testing import SoftmaxDistribution, check_model

SOURCES = ragged_prompts([4, 1, 19, 9, 2], 7)
NUMS = (10, 3, 10, 6, 10)
γ = 3
SMALL = {"vocab_size": 7, "num_layers": 1, "num_decoder_layers": 1}


def as_it_is(each: nn.Module, trace: object) -> Program:
    """The forward pass of a program, neither traced nor compiled."""
    return untraced(each)


class Counting(CompiledExecutor):
    """Counts forward passes, drafts and encoded batches of sources by programs."""

    forwards = drafts = encoded = 0

    def read_sources(self, *arguments: Any) -> bool:
        found = super().read_sources(*arguments)
        self.encoded += found
        return found

    def forward(self, *arguments: Any) -> Any:
        found = super().forward(*arguments)
        self.forwards += found is not None
        return found

    def draft(self, *arguments: Any) -> Any:
        found = super().draft(*arguments)
        self.drafts += found is not None
        return found


def by_programs(model: Seq2SeqModel, make: Compiler = as_it_is) -> Counting:
    """Gives a model programs."""
    eager = model.eager
    executor = Counting(
        eager.module, model.spec, model.name, make, exact=model.exact, recording=eager.recording
    )
    model.compiled = executor
    return executor


def outputs(engine: Engine, sampling: Sampling | None = None) -> list[tuple[int, ...]]:
    """Of sources of five lengths, which end at different times."""
    engine.verification = None  # rules are compiled for any model: ``test_fused_verification.py``
    samplings = [sampling or greedy(num) for num in NUMS]
    return token_ids(engine.generate(SOURCES, samplings))


@pytest.mark.parametrize("family", ["t5", "t5_v1_1", "marian", "bart", "mbart", "pegasus"])
def test_outputs_are_the_same(family: str) -> None:
    """Two rows at a time, so that rows leave and others with longer sources join; and a draft model
    that is often wrong, so that both caches are rolled back."""
    wanted = outputs(engine_of(tiny_seq2seq(family, vocab_size=7)))
    target, draft = (tiny_seq2seq(family, seed, vocab_size=7) for seed in (0, 1))
    executor, drafting = by_programs(target), by_programs(draft)
    engine = engine_of(target, draft, γ=γ, max_batch_size=2)
    assert outputs(engine) == wanted
    assert executor.forwards > 5
    assert drafting.drafts > 5
    assert min(executor.encoded, drafting.encoded) > 2
    assert executor.refused == drafting.refused == []


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_outputs_of_trees_are_the_same(family: str) -> None:
    """The siblings of a tree share a position, which relative positions have to be told of."""
    method = uniform_method(width=3)
    wanted = outputs(engine_of(tiny_seq2seq(family, vocab_size=7)))
    target = tiny_seq2seq(family, vocab_size=7)
    executor = by_programs(target)
    assert outputs(engine_of(target, None, method, γ=12, max_batch_size=2)) == wanted
    assert executor.forwards > 5
    assert executor.refused == []


@pytest.mark.parametrize("method", ["specinfer", "mjsd"])
def test_drafts_of_trees_and_searches_by_one_program(method: str) -> None:
    """Their programs read sources without knowing of them."""
    sampling = Sampling(temperature=0.9, seed=3, max_new_tokens=16, ignore_eos=True)
    target, draft = tiny_seq2seq(), tiny_seq2seq(seed=1)
    wanted = outputs(engine_of(target, draft, method, γ=6, max_batch_size=2), sampling)
    drafting = by_programs(draft)
    assert outputs(engine_of(target, draft, method, γ=6, max_batch_size=2), sampling) == wanted
    assert drafting.drafts > 2
    assert drafting.refused == []


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("method", ["mjgd", "beam-search"])
def test_searches_of_the_target_itself(method: str, family: str) -> None:
    """A second cache beside the target's, with the same sources."""
    wanted = outputs(engine_of(tiny_seq2seq(family), None, method, γ=2, max_batch_size=2))
    target = tiny_seq2seq(family)
    executor = by_programs(target)
    assert outputs(engine_of(target, None, method, γ=2, max_batch_size=2)) == wanted
    assert executor.encoded >= 2 * 2
    assert (executor.drafts if method == "mjgd" else executor.forwards) > 3
    assert executor.refused == []


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_contract(family: str) -> None:
    """Commits, rows that leave and rows that join."""
    model = tiny_seq2seq(family, dtype=torch.float64)
    executor = by_programs(model)
    texts = [[0], [0, 8, 9], [0, *range(20, 40)]]
    with torch.inference_mode():
        check_model(model, model.num_tokens, prompts=texts, sources=SOURCES[:3])
    assert executor.forwards > 5


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_traced_programs(family: str) -> None:
    """Of one layer, since tracing takes seconds: chains, trees and a fused draft."""
    sizes = SMALL if family == "t5" else {"vocab_size": 7, "decoder_layers": 1}
    settings: dict[str, Any] = {"family": family, **sizes}
    wanted = outputs(engine_of(tiny_seq2seq(**settings)))
    target, draft = tiny_seq2seq(**settings), tiny_seq2seq(seed=1, **settings)
    executor, drafting = by_programs(target, interpreted), by_programs(draft, interpreted)
    assert outputs(engine_of(target, draft, γ=2, max_batch_size=2)) == wanted
    method = uniform_method(width=3)
    assert outputs(engine_of(target, None, method, γ=12, max_batch_size=2)) == wanted
    assert min(executor.forwards, drafting.drafts) > 5
    assert min(executor.encoded, drafting.encoded) > 2
    assert executor.refused == drafting.refused == []


@pytest.mark.slow
@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")
def test_a_compiled_program() -> None:
    wanted = outputs(engine_of(tiny_seq2seq(**SMALL)))
    target = tiny_seq2seq(**SMALL)
    use_kernels(target.module)
    executor = by_programs(target, lambda each, trace: compiled_program(each, trace))
    engine = engine_of(target, None, "prompt-lookup", γ=γ, max_batch_size=2)
    assert outputs(engine) == wanted
    assert executor.forwards > 5
    assert executor.encoded > 2
    assert executor.refused == []


def without_mask(each: TreeForward, inputs: list[Tensor]) -> list[Tensor]:
    """As if sources had no padding."""
    return [*inputs[:-1], torch.zeros_like(inputs[-1])]


def other_sources(each: TreeForward, inputs: list[Tensor]) -> list[Tensor]:
    """As if each row read the source of the row before."""
    num_layers = (len(inputs) - each.num_moving) // 4
    first = each.num_moving + num_layers
    end = first + num_layers
    return [*inputs[:first], *(keys.roll(1, 0) for keys in inputs[first:end]), *inputs[end:]]


def other_slot_positions(each: TreeForward, inputs: list[Tensor]) -> list[Tensor]:
    """As if all slots had one position."""
    at = each.num_moving - 1
    return [*inputs[:at], torch.zeros_like(inputs[at]), *inputs[at + 1 :]]


KINDS = ChainForward, TreeForward, GreedyDraft
SPOILED = [(kind, spoil) for kind in KINDS for spoil in (None, without_mask, other_sources)]


@pytest.mark.parametrize(("kind", "spoil"), [*SPOILED, (TreeForward, other_slot_positions)])
def test_the_check_of_programs_reads_sources(kind: type[TreeForward], spoil: Any) -> None:
    """A program that reads them wrongly is found before it is used."""
    model = tiny_seq2seq()
    settings = model.eager.module, model.spec
    each = kind(*settings, 3) if issubclass(kind, GreedyDraft) else kind(*settings)
    right = untraced(each)
    program = right if spoil is None else lambda inputs: right(spoil(each, inputs))
    buffers = halves(model.example_cache().in_use())
    with torch.inference_mode():
        assert bool(compare(each, program, buffers)) == (spoil is not None)


def test_programs_read_the_sources_of_rows_that_join() -> None:
    model = tiny_seq2seq()
    executor = by_programs(model)
    with torch.inference_mode():
        context = unsampled_context(model, [5, 6, 7])
        cache = model.start(context)
        assert (executor.encoded, executor.forwards) == (1, 1)  # the second is the prefill
        num_layers = model.num_layers
        buffers = cache.in_use()
        assert len(buffers) == 4 * num_layers + 1
        assert cache.in_use() is buffers
        source, texts = tuple(range(9)), [[0, 8, 9]]
        other = Context.start(texts, SoftmaxDistribution(), [0], [1], sources=[source])
        model.join(cache, model.start(other))
        keys, values = halves(cache.in_use())
        assert [len(keys), len(values)] == [2 * num_layers, 2 * num_layers + 1]
        assert all(buffer.shape[0] == 2 for buffer in (*keys, *values))
        assert values[-1].shape == (2, 1, 1, 9)
        hidden_BS = values[-1][:, 0, 0] < 0
        assert hidden_BS.sum(1).tolist() == [6, 0]


def started(model: Seq2SeqModel, sources: list[list[int]] = SOURCES) -> Seq2SeqCache:
    texts = [list(model.decoder_prompt or ())] * len(sources)
    rows = range(len(sources))
    with torch.inference_mode():
        context = Context.start(
            texts, SoftmaxDistribution(), [0] * len(rows), rows, sources=sources
        )
        cache = model.start(context)
    assert isinstance(cache, Seq2SeqCache)
    return cache


@pytest.mark.parametrize("family", ["t5", "t5_v1_1", "marian", "bart", "mbart", "pegasus"])
def test_the_encoder_by_a_program(family: str) -> None:
    """Keys and values of sources of five lengths, and no more memory than without it."""
    model = tiny_seq2seq(family)
    wanted = started(model)
    executor = by_programs(model)
    found = started(model)
    assert executor.encoded == 1
    assert found.cross.lengths == wanted.cross.lengths == list(map(len, SOURCES))
    assert found.num_bytes() == wanted.num_bytes()
    assert found.states_BSW.shape == wanted.states_BSW.shape
    torch.testing.assert_close(found.mask_B11S, wanted.mask_B11S, rtol=0, atol=0)
    for mine, other in zip(found.cross.layers, wanted.cross.layers, strict=True):
        for b, source in enumerate(SOURCES):
            length = len(source)
            torch.testing.assert_close(mine.keys[b, :, :length], other.keys[b, :, :length])
            torch.testing.assert_close(mine.values[b, :, :length], other.values[b, :, :length])


def test_a_request_runs_nothing_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once an example has told the shapes of KV buffers."""
    model = tiny_seq2seq(vocab_size=7)
    executor = by_programs(model)
    engine = engine_of(model)
    wanted = outputs(engine)
    executor.encoded = 0

    def forward(*_: object) -> None:
        raise AssertionError("an eager forward pass")

    monkeypatch.setattr(EagerExecutor, "forward", forward)
    assert outputs(engine) == wanted
    assert executor.encoded > 0


@pytest.mark.parametrize("reason", ["width", "kv_dtype"])
def test_sources_that_no_program_encodes(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond the width of compiled forward passes, and those beside KV buffers that programs
    do not read."""
    plain = tiny_seq2seq(vocab_size=7)
    settings = {"kv_dtype": "int8"} if reason == "kv_dtype" else {}
    wanted = outputs(engine_of(plain, max_batch_size=2, **settings))
    executor = by_programs(plain)
    if reason == "width":
        monkeypatch.setattr(runner, "MOST_TOKENS", 8)
    assert outputs(engine_of(plain, max_batch_size=2, **settings)) == wanted
    narrow = [source for source in SOURCES if len(source) <= 8]
    assert executor.encoded == (len(narrow) if reason == "width" else 0)  # rows join one by one


def no_values(each: TreeForward, inputs: list[Tensor]) -> list[Tensor]:
    """As if values were written elsewhere."""
    num_layers = (len(inputs) - each.num_moving) // 4
    values = [torch.zeros_like(value) for value in inputs[-num_layers - 1 : -1]]
    return [*inputs[: -num_layers - 1], *values, inputs[-1]]


def other_order(each: TreeForward, inputs: list[Tensor]) -> list[Tensor]:
    """As if sources were read backwards."""
    return [inputs[0].flip(1), *inputs[1:]]


@pytest.mark.parametrize("spoil", [None, without_mask, no_values, other_order])
def test_the_check_of_the_encoder(spoil: Any) -> None:
    """It compares what the program writes, and not what it returns."""
    model = tiny_seq2seq()
    each = SourcesForward(model.eager.module, model.spec)
    right = untraced(each)
    program = right if spoil is None else lambda inputs: right(spoil(each, inputs))
    buffers = halves(model.example_cache().in_use())
    with torch.inference_mode():
        assert bool(compare(each, program, buffers)) == (spoil is not None)


def test_an_encoder_that_computes_something_else_runs_eagerly() -> None:
    """The decoder's programs stay."""
    wanted = outputs(engine_of(tiny_seq2seq(vocab_size=7)))
    model = tiny_seq2seq(vocab_size=7)

    def make(each: nn.Module, trace: object) -> Program:
        right = untraced(each)
        if not isinstance(each, SourcesForward):
            return right
        return lambda inputs: right(other_order(each, inputs))

    executor = by_programs(model, make)
    with pytest.warns(
        OutriderWarning, match="the encoder program compiled, but its results differ"
    ):
        assert outputs(engine_of(model)) == wanted
    assert executor.refused == ["encoder"]
    assert executor.encoded == 0
    assert executor.forwards > 5


def test_an_encoder_that_does_not_compile_runs_eagerly() -> None:
    wanted = outputs(engine_of(tiny_seq2seq(vocab_size=7)))
    model = tiny_seq2seq(vocab_size=7)

    def make(each: nn.Module, trace: object) -> Program:
        raise RuntimeError("no such operator")

    executor = by_programs(model, make)
    with pytest.warns(OutriderWarning, match="model does not compile, so it runs eagerly: no such"):
        assert outputs(engine_of(model)) == wanted
    assert executor.encoded == executor.forwards == 0


def test_the_encoder_is_compiled_ahead() -> None:
    """So that a sealed executor has a program for it."""
    model = tiny_seq2seq()
    executor = by_programs(model)
    by_name = dict(stages(model))
    assert list(by_name) == ["forward passes", "encoder"]
    by_name["encoder"]()
    executor.sealed = True
    executor.encoded = 0
    started(model)
    assert executor.encoded == 1


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_hidden_states_by_programs(family: str) -> None:
    model = tiny_seq2seq(family).with_hidden_states([1, 3])
    with torch.inference_mode():
        context = unsampled_context(model, [5, 6, 7])
        batch = partial(ForwardBatch, tokens_BN=context.tokens_BT, hidden_layers=(1, 3))
        wanted = model.forward(batch(model.start(context)))
        cache = model.start(context)
        executor = by_programs(model)
        found = model.forward(batch(cache))
    assert executor.forwards == 1
    assert found.hidden_BNH is not None
    torch.testing.assert_close(found, wanted)
