"""Prompts go into the cache by the graph, but for those of exact models and of very many rows; how
wide the passes are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted_graphs import interpreted, without_compiler
from tiny_models import FAMILIES, engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider.core import Context
from outrider.runtime import HFModel, runner
from outrider.runtime.executors import compiled
from outrider.runtime.executors.compiled import MOST_TOKENS, CompiledExecutor
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.hf import adapter
from outrider.runtime.kernels.build import load_kernels
from outrider.runtime.kv_cache.footprint import Footprint
from outrider.runtime.prefill import SHARED_WIDTH, width_of_passes
from outrider.testing import SoftmaxDistribution


class Counted(CompiledExecutor):
    """A graph that keeps the widths of its passes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.widths: list[int] = []

    def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
        output = super().forward(batch)
        if output is not None:
            self.widths.append(batch.tokens_BN.shape[1])
        return output


def with_graph(model: HFModel) -> tuple[HFModel, list[int]]:
    """The model with a graph, and the widths of its passes."""
    graph = Counted(model.module, model.spec, "graph", interpreted)
    model.compiled = graph
    return model, graph.widths


def context_of(lengths: list[int]) -> Context:
    return Context.start(
        ragged_prompts(lengths), SoftmaxDistribution(), [0] * len(lengths), lengths
    )


@pytest.mark.parametrize("lengths", [[2], [9], [40, 3, 17]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_fills_the_cache_with_the_same_numbers(family: str, lengths: list[int]) -> None:
    eager, (graphed, widths) = tiny(family), with_graph(tiny(family))
    with torch.inference_mode():
        wanted, found = (model.start(context_of(lengths)) for model in (eager, graphed))
    assert graphed.compiled is not None
    assert not graphed.compiled.failed
    assert widths == [max(lengths) - 1]
    assert found.lengths == wanted.lengths == [length - 1 for length in lengths]
    assert torch.equal(found.length_B, wanted.length_B)
    for sides in zip((wanted.keys, wanted.values), (found.keys, found.values), strict=True):
        for one, other in zip(*sides, strict=True):
            assert one is not None
            assert other is not None
            assert one.shape == other.shape
            for row, length in enumerate(wanted.lengths):
                torch.testing.assert_close(one[row, :, :length], other[row, :, :length])


def test_long_prompts_go_by_the_graph_in_passes_and_those_of_very_many_rows_do_not() -> None:
    most = MOST_TOKENS // SHARED_WIDTH
    for length, rows, passes in (
        (MOST_TOKENS + 1, 1, [MOST_TOKENS]),
        (MOST_TOKENS + 9, 1, [MOST_TOKENS, 8]),
        (MOST_TOKENS // 3 + 1, 3, [MOST_TOKENS // 3]),
        (MOST_TOKENS // 3 + 2, 3, [MOST_TOKENS // 3, 1]),
        (2 * SHARED_WIDTH + 1, most, [SHARED_WIDTH] * 2),
        (2 * SHARED_WIDTH + 1, most + 1, []),
    ):
        model, widths = with_graph(tiny(max_position_embeddings=1024))
        with torch.inference_mode():
            model.start(context_of([length] * rows))
        assert widths == passes


def shapes_of_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The rows and tokens of each forward pass from now on."""
    shapes: list[tuple[int, int]] = []
    forward = HFModel.forward

    def noting(self: HFModel, batch: ForwardBatch) -> ForwardOutput:
        rows, width = batch.tokens_BN.shape
        shapes.append((rows, width))
        return forward(self, batch)

    monkeypatch.setattr(HFModel, "forward", noting)
    return shapes


@pytest.mark.parametrize(
    ("lengths", "passes"),
    [
        ([301, 140, 9, 2], [(4, 128), (2, 172)]),
        ([301, 140, 129, 1], [(4, 128), (2, 172)]),
        ([9, 301, 140, 2], [(4, 128), (3, 170), (2, 2)]),  # the longest is not the first
        ([301] * 4, [(4, 128), (4, 128), (4, 44)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("graphed", [False, True])
def test_rows_whose_prompts_are_read_take_no_further_part(
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    passes: list[tuple[int, int]],
    graphed: bool,
) -> None:
    """And what the cache holds is what each prompt alone leaves there."""
    model = tiny(max_position_embeddings=512)
    if graphed:
        model, _ = with_graph(model)
        with torch.inference_mode():
            model.start(context_of([3]))  # tries the graph
    shapes = shapes_of_passes(monkeypatch)
    context = context_of(lengths)
    with torch.inference_mode():
        cache = model.start(context)
    assert shapes == passes
    assert cache.lengths == [length - 1 for length in lengths]
    assert torch.equal(cache.length_B, context.length_B - 1)
    for row, length in enumerate(lengths):
        if length > 1:
            alone = tiny(max_position_embeddings=512)
            with torch.inference_mode():
                own = alone.start(
                    Context.start(
                        [context.tokens_BT[row, :length].tolist()], SoftmaxDistribution(), [0], [0]
                    )
                )
            for sides in zip((own.keys, own.values), (cache.keys, cache.values), strict=True):
                for one, other in zip(*sides, strict=True):
                    assert one is not None
                    assert other is not None
                    wanted, found = one[0, :, : length - 1], other[row, :, : length - 1]
                    torch.testing.assert_close(found, wanted)


def test_rows_that_leave_do_not_change_the_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first all rows together have 512 tokens per pass, and fewer later."""
    shapes = shapes_of_passes(monkeypatch)
    context = context_of([301, 9, 200, 301])
    with torch.inference_mode():
        prefill = tiny(max_position_embeddings=512).begin(context)
        prefill.step()
        for each in (prefill.cache, context):
            each.keep([0, 3])
        cache = prefill.finish()
    assert shapes == [(4, 128), (2, 128), (2, 44)]
    assert cache.lengths == [300, 300]


@pytest.mark.parametrize(
    ("device", "cuts_back", "widths"),
    [
        ("cpu", True, {1: 512, 2: 256, 3: 170, 8: 64, 32: 16, 33: 16, 200: 16}),
        ("cpu", False, {1: 512, 3: 512, 200: 512}),
        ("cuda", True, {1: 512, 3: 512, 200: 512}),
        ("mps", True, {1: 512, 3: 512, 200: 512}),
    ],
)
def test_rows_share_passes_on_a_cpu_unless_they_carry_a_state(
    device: str, cuts_back: bool, widths: dict[int, int]
) -> None:
    def cache(rows: int) -> Any:
        context = SimpleNamespace(device=torch.device(device))
        return SimpleNamespace(context=context, cuts_back=cuts_back, num_rows=rows)

    assert {rows: width_of_passes(cache(rows), rows) for rows in widths} == widths


@pytest.mark.parametrize("num_logits", [0, 1, 3, 9])
def test_the_graph_computes_the_logits_that_are_asked_for(num_logits: int) -> None:
    found = []
    for model in (tiny(), with_graph(tiny())[0]):
        context = context_of([9, 4])
        with torch.inference_mode():
            cache = model.start(context)
            output = model.forward(ForwardBatch(cache, context.tokens_BT[:, :5], None, num_logits))
        found.append(output.logits_BNV)
    assert found[0].shape[:2] == (2, min(num_logits or 5, 5))
    torch.testing.assert_close(*found)


def test_a_graph_that_computes_all_logits_reads_short_prompts_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "selects_logits", lambda module: False)
    for products, passes in ((runner._PRODUCTS_PER_LAYER, [8]), (1, [])):
        monkeypatch.setattr(runner, "_PRODUCTS_PER_LAYER", products)  # 1: a huge vocabulary
        model, widths = with_graph(tiny())
        with torch.inference_mode():
            model.start(context_of([9]))
        assert widths == passes


def test_an_exact_model_reads_all_prompts_in_one_way() -> None:
    """A batch's size may not change the bits of a row."""
    model, widths = with_graph(tiny())
    load_kernels()  # which exact mode is a part of
    model.exact = True
    model.start(context_of([9]))
    assert not widths


def test_the_graph_reads_what_follows_a_reused_prefix() -> None:
    """And buffers that hold a prefix are large enough for it."""
    prompt = ragged_prompts([61])[0]
    wanted = engine_of(tiny()).generate([prompt, [*prompt, *range(30)]], greedy(1))
    model, widths = with_graph(tiny())
    engine = without_compiler(engine_of(model, prefix_cache="1GB"))
    assert engine.generate([prompt], greedy(1))[0].token_ids == wanted[0].token_ids
    widths.clear()
    found = engine.generate([[*prompt, *range(30)]], greedy(1))[0]
    assert (found.stats.reused, found.token_ids) == (61, wanted[1].token_ids)
    assert widths == [29, 1]


def test_a_prompt_of_one_token_and_long_ones() -> None:
    def models() -> tuple[HFModel, HFModel]:
        return tiny(max_position_embeddings=512), tiny(seed=1, max_position_embeddings=512)

    prompts = ragged_prompts([1, 140, 30])
    wanted = token_ids(engine_of(*models()).generate(prompts, greedy(9)))
    engine = without_compiler(engine_of(*(with_graph(model)[0] for model in models())))
    assert token_ids(engine.generate(prompts, greedy(9))) == wanted


def test_the_layout_is_learned_once_and_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, widths = with_graph(tiny())
    learned: list[int] = []
    layout_of = adapter._layout
    monkeypatch.setattr(adapter, "_layout", lambda m: learned.append(1) or layout_of(m))  # type: ignore[func-returns-value]
    for _ in range(2):
        context = context_of([9])
        with torch.inference_mode():
            model.start(context)
        assert not context.health.drain()
    assert learned == [1]
    assert widths == [8, 8]


def test_a_model_without_buffers_in_every_layer_is_left_to_its_passes() -> None:
    """As some share keys and values between layers."""
    model, widths = with_graph(tiny())
    model.num_layers += 1  # a layer that keeps nothing
    with torch.inference_mode():
        cache, wanted = model.start(context_of([9])), tiny().start(context_of([9]))
    assert cache.keys[-1] is None
    assert not widths
    for one, other in zip(wanted.keys, cache.keys, strict=False):
        torch.testing.assert_close(one, other)


def test_what_buffers_take_is_learned_without_the_graph() -> None:
    """An engine asks before its graphs are made, under a bar."""
    model, widths = with_graph(tiny())
    assert Footprint.of(model) == Footprint.of(tiny())
    assert not widths
