"""Compiled passes say what eager ones say; exact ones say it with the same bits in any company."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_outputs import assert_exact, near
from interpreted_graphs import interpreted, without_compiler
from tiny_models import engine_of, greedy, ragged_prompts, save_compiled, tiny, token_ids
from tiny_seq2seq import tiny_seq2seq
from torch import nn
from torch.export import ExportedProgram
from transformers import LlamaForCausalLM

from outrider import Sampling, load_model
from outrider.core.errors import (
    InvalidParameterError,
    KernelError,
    OutriderWarning,
    UnsupportedModelError,
)
from outrider.engine.warming import warm_up
from outrider.runtime import HFModel
from outrider.runtime.executors.compile_cache import Program
from outrider.runtime.executors.compiled import MOST_TOKENS, CompiledExecutor
from outrider.runtime.executors.prepare import prepare, stages
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.kernels import NarrowLinear, build, use_kernels

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")
SAMPLED = Sampling(temperature=0.9, seed=3, max_new_tokens=12, ignore_eos=True)


def with_graph(model: HFModel, kind: type[CompiledExecutor] = CompiledExecutor) -> HFModel:
    """The same model with a graph."""
    model.compiled = kind(model.module, model.spec, "graph", interpreted)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), [("llama", "top-k-tree"), ("gemma3", "speculative")])
def test_graphs_write_the_same_text(family: str, method: str) -> None:
    """Alone and in ragged batches whose rows leave, chains and trees, windows and none."""
    prompts = ragged_prompts([9, 3, 14])
    pairs = [(tiny(family), tiny(family, 1)), (with_graph(tiny(family)), tiny(family, 1))]
    texts = []
    for target, draft in pairs:
        engine = without_compiler(engine_of(target, draft, method, max_batch_size=2))
        texts.append(
            [
                token_ids(engine.generate(prompts, [greedy(n) for n in (14, 6, 9)])),
                token_ids(engine.generate(prompts[:1], greedy(40))),  # KV buffers grow on the way
            ]
        )
    assert texts[0] == texts[1]


def test_every_pass_of_a_round_is_the_graphs_and_one_graph_is_enough() -> None:
    """For any number of rows, whatever the width, the context and the KV buffers."""
    made = []

    class Counted(CompiledExecutor):
        calls = 0

        def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
            self.calls += 1
            return super().forward(batch)

    def counting(module: nn.Module, trace: Callable[[], ExportedProgram]) -> Program:
        made.append(module)
        return interpreted(module, trace)

    model = tiny()
    model.compiled = Counted(model.module, model.spec, "counted", counting)
    engine = without_compiler(engine_of(model, None, "prompt-lookup", max_batch_size=3))
    engine.generate(ragged_prompts([4, 30, 11, 7, 2]), greedy(30))
    engine.generate(ragged_prompts([50]), SAMPLED)
    engine_of(model).generate(
        ragged_prompts([50]), greedy(30)
    )  # through each length of a KV buffer
    assert model.compiled.calls > 30
    assert len(made) == 1
    assert not model.compiled.failed


def test_wide_passes_run_eagerly() -> None:
    """Arithmetic decides there: beyond so many tokens over all rows no graph is asked for."""
    asked = []

    class Asked(CompiledExecutor):
        def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
            asked.append(batch.tokens_BN.numel())
            return super().forward(batch)

    rows = MOST_TOKENS // 5 + 1  # of passes over 5 tokens, as many as are too many
    prompts = ragged_prompts([3 + n % 4 for n in range(rows)])
    samplings = [greedy(4 + n % 9) for n in range(rows)]  # so that rows leave at different times
    wanted = engine_of(tiny(), tiny(seed=1), max_batch_size=rows).generate(prompts, samplings)
    engine = engine_of(with_graph(tiny(), Asked), tiny(seed=1), max_batch_size=rows)
    engine = without_compiler(engine)
    assert token_ids(engine.generate(prompts, samplings)) == token_ids(wanted)
    assert asked
    assert max(asked) <= MOST_TOKENS


def test_models_of_one_shape_keep_their_own_graphs() -> None:
    """Constants of a model are part of its graph, and what they are is not checked again."""
    prompts = ragged_prompts([9])
    for epsilon in (1e-6, 0.1, 10.0):
        settings = {"rms_norm_eps": epsilon}
        wanted = token_ids(engine_of(tiny(**settings)).generate(prompts, greedy(12)))
        with warnings.catch_warnings():
            warnings.simplefilter("error", OutriderWarning)
            found = engine_of(with_graph(tiny(**settings))).generate(prompts, greedy(12))
        assert token_ids(found) == wanted


def test_what_does_not_compile_runs_eagerly_after_one_warning() -> None:
    model = tiny()

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1.0 if float(x.sum()) == 0.5 else 2.0)

    model.module.model.norm = nn.Sequential(model.module.model.norm, Odd())
    eager = HFModel(model.module)
    model.compiled = CompiledExecutor(model.module, model.spec, "odd", interpreted)
    before = token_ids(engine_of(eager).generate(ragged_prompts([5]), greedy(8)))
    with pytest.warns(OutriderWarning, match="odd does not compile, so it runs eagerly") as seen:
        after = token_ids(engine_of(model).generate(ragged_prompts([5]), greedy(8)))
    assert len(seen) == 1
    assert after == before


def test_a_graph_that_computes_something_else_is_not_used() -> None:
    def wrong(module: nn.Module, trace: Callable[[], ExportedProgram]) -> Program:
        right = interpreted(module, trace)

        def graph(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            logits_BNV, sum_B = right(inputs)
            return [logits_BNV * 1.01, sum_B]

        return graph

    model = tiny()
    before = token_ids(engine_of(model).generate(ragged_prompts([5]), greedy(8)))
    model.compiled = CompiledExecutor(model.module, model.spec, "wrong", wrong)
    with pytest.warns(OutriderWarning, match="^wrong: the chain program compiled, but") as seen:
        after = token_ids(engine_of(model).generate(ragged_prompts([5]), greedy(8)))
    assert len(seen) == 1
    assert after == before


def test_encoder_decoders_run_eagerly_on_a_gpu_after_one_warning() -> None:
    model = tiny_seq2seq("t5")
    model.device = torch.device("cuda")
    with pytest.warns(OutriderWarning, match="encoder-decoder, which is compiled on a CPU") as seen:
        prepare(model, "auto")
    assert len(seen) == 1
    assert model.compiled is None


def test_names_the_levels_there_are() -> None:
    with pytest.raises(InvalidParameterError, match=r"compile=.fast.: must be one of"):
        prepare(tiny(), "fast")


def test_without_a_compiler_models_run_eagerly_but_not_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: object, **__: object) -> None:
        raise KernelError("no C++ compiler here")

    monkeypatch.setattr("outrider.runtime.executors.prepare.use_kernels", none)
    model = tiny()
    with pytest.warns(OutriderWarning, match="runs eagerly: no C"):
        prepare(model, "auto")
    assert model.compiled is None
    with pytest.raises(KernelError, match="no C"):
        prepare(model, "off", exact=True)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_models_in_other_precisions_keep_the_libraries(dtype: torch.dtype) -> None:
    prompts = ragged_prompts([9])
    before = token_ids(engine_of(tiny(dtype=dtype)).generate(prompts, greedy(8)))
    model = tiny(dtype=dtype)
    use_kernels(model.module)
    assert token_ids(engine_of(model).generate(prompts, greedy(8))) == before


@needs_compiler
@pytest.mark.slow
@pytest.mark.vector_width
@pytest.mark.vector_loops
def test_compiled_for_real(tmp_path: Path) -> None:
    """Kernels and the code generator together: the text of the model as it was. One layer and short
    drafts make small programs, of which there are two: target and draft have the same shape, which
    ``test_a_compiled_demo`` has, too."""
    prompts = ragged_prompts([9])
    folders = [save_compiled(tmp_path / str(seed), seed) for seed in (0, 1)]

    def pair() -> list[HFModel]:
        modules = map(LlamaForCausalLM.from_pretrained, folders)
        return [load_model(each.float().eval()) for each in modules]

    before = token_ids(engine_of(*pair(), γ=2).generate(prompts, greedy(20)))
    target, draft = pair()
    for model in (target, draft):
        prepare(model, "auto", own=True)
        assert isinstance(model.module.lm_head, NarrowLinear)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutriderWarning)
        for _, make in stages(target):
            make()
        engine = engine_of(target, draft, γ=2)
        engine.verification = None  # rules are compiled for real in tests of their own
        after = token_ids(engine.generate(prompts, greedy(20)))
    assert after == before
    assert draft.compiled is not None
    made = {each.kind: graph for each, graph in draft.compiled._programs.items()}
    assert set(made) == {"chain", "greedy draft"}
    assert all(made.values())


@needs_compiler
@pytest.mark.slow
def test_a_pair_in_bfloat16_is_compiled_for_real() -> None:
    """Both models, and fused drafts, greedy and sampled, without a warning."""
    target, draft = (tiny(seed=seed, dtype=torch.bfloat16, num_hidden_layers=1) for seed in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutriderWarning)
        for model in (target, draft):
            prepare(model, "auto", own=True)
        engine = engine_of(target, draft, γ=2)
        engine.verification = None  # rules are compiled for real in tests of their own
        warm_up(engine)
        engine.generate(ragged_prompts([9, 3]), [greedy(9), SAMPLED])
    assert target.compiled is not None
    assert draft.compiled is not None
    made = {each.kind: graph for each, graph in draft.compiled._programs.items()}
    assert set(made) == {"chain", "greedy draft", "sampled draft"}
    assert all(graph is not None for graph in (*made.values(), *target.compiled._programs.values()))


EXACT_FAMILIES = [
    *("llama", "mistral", "gemma3"),
    *(pytest.param(name, marks=pytest.mark.vector_width) for name in ("qwen3", "gpt_neox", "opt")),
]


@needs_compiler
@pytest.mark.parametrize("family", EXACT_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_texts_are_plain_ones(family: str, dtype: torch.dtype) -> None:
    """In bfloat16 too, where passes of other widths otherwise change near ties. At other vector
    widths, ``test_exact_arithmetic.py`` has Llama and Gemma 3 in odd sizes, and Mistral has the
    layers of Llama."""
    target, draft = tiny(family, dtype=dtype), near(family, dtype=dtype)
    prepare(target, exact=True)
    assert_exact(target, draft)


@needs_compiler
@pytest.mark.parametrize("family", ["mixtral", "gpt2"])
def test_refuses_to_be_exact_where_it_is_not(family: str) -> None:
    """Experts and transposed layers multiply by the libraries, whose bits depend on the width; a
    model whose probe happens to agree may pass, so a layer that surely differs is put in."""

    class Width(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1 + 1e-3 * x.shape[1])

    model = tiny(family)
    name = "model" if family == "mixtral" else "transformer"
    stem: Any = getattr(model.module, name)
    norm = "norm" if family == "mixtral" else "ln_f"
    setattr(stem, norm, nn.Sequential(getattr(stem, norm), Width()))
    with pytest.raises(UnsupportedModelError, match=r"exact=True.*bits depend on how many tokens"):
        prepare(model, exact=True)
