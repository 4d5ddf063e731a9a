"""Forward passes by programs of layers compute what the model computes, and give way to programs of
whole forward passes.

Programs are traced and then run by torch itself, but where a test says that they are compiled.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted_graphs import interpreted, untraced
from tiny_models import FAMILIES, VOCAB, engine_of, greedy, ragged_prompts, tiny, token_ids
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional

from outrider import Sampling
from outrider.core.errors import UnsupportedModelError
from outrider.runtime import HFModel
from outrider.runtime.attention_metadata import AttentionSpec
from outrider.runtime.executors import compile_cache
from outrider.runtime.executors.compile_cache import Program, ProgramMissingError, dependencies
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.layer_calls import SIZES, LayerCall, layer_calls
from outrider.runtime.executors.layer_programs import LayerForward
from outrider.runtime.executors.prepare import layer_stages, prepare
from outrider.runtime.executors.traced import QUERIES, TreeForward
from outrider.runtime.executors.traced_cache import ROWS
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.prefill import unsampled_context

KINDS = {"gemma2": 2, "gemma3": 2}
"""Kinds of layers of a family, where there is more than one."""


class Layers:
    """Makes programs of layers; finds those of forward passes missing until it is told otherwise.

    Args:
        make: makes a program.

    Attributes:
        has_forwards: whether there are programs of forward passes.
        keys: of the layers' programs, by layer.
        calls: how often programs of layers have run.
    """

    def __init__(self, make: Callable[..., Program] = interpreted) -> None:
        self._make = make
        self.has_forwards = False
        self.keys: list[str] = []
        self.calls = 0

    def __call__(self, module: nn.Module, trace: Callable[[], ExportedProgram]) -> Program:
        if not isinstance(module, LayerForward):
            if self.has_forwards:
                return untraced(module)
            raise ProgramMissingError
        self.keys.append("\0".join(dependencies(module)))
        program = self._make(module, trace)

        def counted(inputs: list[Tensor]) -> list[Tensor]:
            self.calls += 1
            return program(inputs)

        return counted


def by_layers(model: HFModel, make: Callable[..., Program] = interpreted) -> Layers:
    """Lets a model run by programs of its layers."""
    layers = Layers(make)
    model.compiled = CompiledExecutor(
        model.module, model.spec, model.name, layers, recording=model.eager.recording
    )
    model.compiled.run_layers(model.example_cache().in_use())
    layers.calls = 0
    return layers


@torch.inference_mode()
def logits_of(model: HFModel, hidden_layers: tuple[int, ...] = ()) -> list[Tensor]:
    """Logits after a prompt, for two rows of three query tokens, and hidden states if asked for."""
    context = unsampled_context(model, ragged_prompts([14])[0], rows=2)
    cache = model.start(context)
    batch = ForwardBatch(cache, torch.arange(6).view(2, 3), hidden_layers=hidden_layers)
    output = model.forward(batch)
    return [output.logits_BNV, *([output.hidden_BNH] if hidden_layers else [])]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_run_by_programs_of_their_layers(family: str) -> None:
    """Equal layers share a program, since their programs have the same key; outputs in a ragged
    batch are those of the model."""
    prompts = ragged_prompts([1, 14, 5, 23])
    wanted = engine_of(tiny(family)).generate(prompts, greedy(12))
    model = tiny(family)
    layers = by_layers(model)
    assert len(layers.keys) == model.num_layers
    assert len(set(layers.keys)) == KINDS.get(family, 1)
    found = engine_of(model).generate(prompts, greedy(12))
    assert token_ids(found) == token_ids(wanted)
    assert layers.calls > 12 * model.num_layers


@pytest.mark.parametrize("method", ["speculative", "top-k-tree", "dynamic-tree"])
@pytest.mark.parametrize("sampling", [greedy(12), Sampling(max_new_tokens=12, seed=3)])
def test_drafts_and_trees_run_by_programs_of_layers(method: str, sampling: Sampling) -> None:
    prompts = ragged_prompts([9, 30])
    wanted = engine_of(tiny(), tiny(seed=1), method).generate(prompts, sampling)
    target, draft = tiny(), tiny(seed=1)
    calls = [by_layers(each) for each in (target, draft)]
    engine = engine_of(target, draft, method)
    engine.verification = None  # rules are compiled for real in tests of their own
    assert token_ids(engine.generate(prompts, sampling)) == token_ids(wanted)
    assert all(each.calls for each in calls)


@pytest.mark.parametrize("hidden_layers", [(1,), (2,), (1, 2)])
def test_hidden_states_are_those_of_the_model(hidden_layers: tuple[int, ...]) -> None:
    model = tiny()
    wanted = logits_of(model, hidden_layers)
    layers = by_layers(model)
    found = logits_of(model, hidden_layers)
    assert layers.calls
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_layers_are_kept_apart_by_their_settings_and_their_weights() -> None:
    """An attribute of a layer is part of its program's key; weights are not, and each layer has its
    own."""
    model = tiny(num_hidden_layers=3)
    model.module.model.layers[1].self_attn.scaling *= 2
    wanted = logits_of(model)
    layers = by_layers(model)
    first, second, third = layers.keys
    assert first == third != second
    torch.testing.assert_close(logits_of(model), wanted)


def test_a_program_of_the_whole_forward_pass_replaces_those_of_layers() -> None:
    model = tiny()
    layers = by_layers(model)
    wanted = logits_of(model)
    assert layers.calls
    layers.has_forwards, layers.calls = True, 0
    torch.testing.assert_close(logits_of(model), wanted)
    assert not layers.calls


def wrong(module: nn.Module, trace: Callable[[], ExportedProgram]) -> Program:
    """A program whose results are a tenth too large."""
    program = interpreted(module, trace)
    return lambda inputs: [1.1 * each for each in program(inputs)]


def failing(module: nn.Module, trace: Callable[[], ExportedProgram]) -> Program:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize("make", [wrong, failing])
def test_layers_that_do_not_compile_or_compute_something_else_are_not_used(
    make: Callable[..., Program],
) -> None:
    """Without a warning, which a program of the whole forward pass has."""
    model = tiny()
    wanted = logits_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = by_layers(model, make)
        found = logits_of(model)
    assert model.compiled is not None
    assert not model.compiled.has_programs
    assert not layers.calls
    torch.testing.assert_close(found, wanted)


class Layer(nn.Module):
    def forward(self, x: Tensor, told: Any, cache: Any) -> Any:
        return x, told


class Model(nn.Module):
    """A model that tells its layers something about its tokens.

    Args:
        tell: what.
    """

    def __init__(self, tell: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.tell = tell

    def forward(self, input_ids: Tensor, past_key_values: Any, **kwargs: Any) -> Any:
        x_BNV = functional.one_hot(input_ids, VOCAB).float()
        for layer in self.layers[: 1 + (input_ids.shape[1] != SIZES[1])]:
            x_BNV, _ = layer(x_BNV, self.tell(input_ids), past_key_values)
        return SimpleNamespace(logits=x_BNV)


def calls_of(tell: Callable[[Tensor], Any], num: int = 1) -> list[LayerCall]:
    """How the model calls its first layers."""
    model = Model(tell)
    spec = AttentionSpec({"full": None}, 128, torch.float32)
    buffers = [torch.zeros(1, 1, 8, 4)]
    return layer_calls(TreeForward(model, spec), list(model.layers)[:num], (buffers, buffers))


def test_sizes_that_vary_are_found_by_themselves() -> None:
    (call,) = calls_of(lambda tokens_BN: {"rows": tokens_BN[:, 0], "three": torch.zeros(3)})
    x_sizes, row_sizes, three_sizes = call.sizes
    assert x_sizes == {0: ROWS, 1: QUERIES}
    assert (row_sizes, three_sizes) == ({0: ROWS}, {})  # as many as there are rows by chance


@pytest.mark.parametrize(
    ("tell", "why"),
    [
        (lambda tokens_BN: tokens_BN.shape[1], "different things in different forward passes"),
        (lambda tokens_BN: tokens_BN.flatten(), r"a tensor of \(15,\) among a layer's arguments"),
        (lambda tokens_BN: "word", "returns more than tensors"),
    ],
)
def test_layers_that_no_program_can_replace(tell: Callable[[Tensor], Any], why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        calls_of(tell)


def test_a_layer_that_is_left_out_has_no_program() -> None:
    with pytest.raises(UnsupportedModelError, match="leaves a layer out"):
        calls_of(lambda tokens_BN: None, num=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_models_have_the_same_bits_by_layers(dtype: torch.dtype) -> None:
    """By the programs that would be compiled, run by torch, in forward passes of two rows."""
    model = tiny(dtype=dtype, hidden_size=36, intermediate_size=50)
    prepare(model, exact=True)
    wanted = logits_of(model)
    layers = Layers()
    model.compiled = CompiledExecutor(model.module, model.spec, "exact", layers, exact=True)
    model.compiled.run_layers(model.example_cache().in_use())
    assert model.compiled.has_programs
    layers.calls = 0
    assert torch.equal(logits_of(model)[0], wanted[0])
    assert layers.calls


@pytest.mark.slow
def test_compiled_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for all layers, which a second model finds in the cache folder."""
    compiled: list[str] = []
    compile_one = compile_cache._compile

    def counting(*args: Any) -> None:
        compiled.append("program")
        compile_one(*args)

    monkeypatch.setattr(compile_cache, "_compile", counting)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    for _ in range(2):
        model = tiny(num_hidden_layers=4)
        prepare(model, "auto", own=True)
        wanted = logits_of(model.without_compiled())
        assert model.compiled is not None
        model.compiled.sealed = True
        model.compiled.run_layers(model.example_cache().in_use())
        assert model.compiled.has_programs
        torch.testing.assert_close(logits_of(model), wanted)
    assert compiled == ["program"]


def test_models_of_few_layers_have_no_programs_of_layers() -> None:
    for num, has in ((3, False), (4, True)):
        model = tiny(num_hidden_layers=num)
        assert not layer_stages(model)
        model.compiled = CompiledExecutor(model.module, model.spec, model.name, Layers())
        assert bool(layer_stages(model)) == has
