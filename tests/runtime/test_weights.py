"""Weights are read and exchanged in place, whatever the kernels and compiled programs made of
them."""

import pytest
import torch
from interpreted_graphs import interpreted
from tiny_models import engine_of, greedy, ragged_prompts, tiny, tiny_module, token_ids

from outrider.core.errors import IncompatibleError, UnsupportedModelError
from outrider.runtime import HFModel
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.kernels import build, use_kernels
from outrider.runtime.kernels.layers import NarrowLinear
from outrider.runtime.weights import plain_weights, staged

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")

FORMS = {
    "plain": (torch.float32, False, False),
    "plain bfloat16": (torch.bfloat16, False, False),
    "packed": (torch.float32, True, False),
    "packed in bfloat16": (torch.float32, True, True),
    "packed bfloat16": (torch.bfloat16, True, False),
}


def model(form: str, seed: int = 0, tied: bool = False) -> HFModel:
    """A model whose weights are stored in a form; ``packed in bfloat16`` means that its float32
    weights are bfloat16 numbers, which packing notices."""
    dtype, packed, rounded = FORMS[form]
    if packed and build.find_compiler() is None:
        pytest.skip("no C++ compiler here")
    module = tiny_module("llama", seed, dtype=dtype, tie_word_embeddings=tied)
    if rounded:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(parameter.bfloat16())
    if packed:
        use_kernels(module, compact=True)
    return HFModel(module, name="draft")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("form", FORMS)
def test_packed_weights_are_read_back_exactly(form: str, tied: bool) -> None:
    dtype, _, rounded = FORMS[form]
    plain = tiny_module("llama", dtype=dtype, tie_word_embeddings=tied)
    wanted = {name: x.float() for name, x in plain.state_dict().items()}
    if rounded:
        wanted = {name: x.bfloat16().float() for name, x in wanted.items()}
    found = plain_weights(model(form, tied=tied).module)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("form", FORMS)
def test_exchanged_weights_are_those_of_a_model_made_with_them(form: str, tied: bool) -> None:
    """Outputs of the model are those of a model of that form that had the weights at first; its
    parameters stay where they are, so programs that hold their addresses read the new ones."""
    changed, other = model(form, seed=0, tied=tied), model(form, seed=1, tied=tied)
    places = [parameter.data_ptr() for parameter in changed.module.parameters()]
    dtypes = [parameter.dtype for parameter in changed.module.parameters()]
    prompts = ragged_prompts([9, 4])
    before = token_ids(engine_of(changed).generate(prompts, greedy(12)))
    staged(changed.module, plain_weights(other.module)).write()
    after = token_ids(engine_of(changed).generate(prompts, greedy(12)))
    assert after == token_ids(engine_of(other).generate(prompts, greedy(12)))
    assert after != before
    assert places == [parameter.data_ptr() for parameter in changed.module.parameters()]
    assert dtypes == [parameter.dtype for parameter in changed.module.parameters()]


@needs_compiler
def test_weights_that_bfloat16_cannot_hold_are_rounded_into_its_place() -> None:
    """A layer that was packed in bfloat16 keeps that dtype, which its compiled programs assume."""
    narrow = model("packed in bfloat16")
    wide = plain_weights(tiny_module("llama", seed=1))
    staged(narrow.module, wide).write()
    found = plain_weights(narrow.module)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[name], wide[name].bfloat16().float())
    assert not torch.equal(found[name], wide[name])


def test_a_copy_has_weights_of_its_own() -> None:
    shared = tiny(name="draft")
    copy = shared.with_own_weights()
    before = plain_weights(shared.module)
    staged(copy.module, plain_weights(tiny_module("llama", seed=1))).write()
    for name, weight in plain_weights(shared.module).items():
        assert torch.equal(weight, before[name]), name
    assert copy.name == shared.name
    assert copy.limit == shared.limit


def test_compiled_drafts_of_a_copy_use_the_weights_it_has() -> None:
    """The fused draft of the copy, run by its traced program, proposes what an eager draft with the
    same weights does, before and after the weights are exchanged."""
    draft = tiny(seed=1, name="draft")
    draft.compiled = CompiledExecutor(draft.module, draft.spec, "graph", interpreted)
    copy = draft.with_own_weights()
    assert copy.compiled is not None
    assert copy.compiled is not draft.compiled
    prompts = ragged_prompts([9, 9])
    for seed in (1, 0, 2):
        other = tiny(seed=seed)
        staged(copy.module, plain_weights(other.module)).write()
        stats = engine_of(tiny(), copy).generate(prompts, greedy(16)).stats
        wanted = engine_of(tiny(), other).generate(prompts, greedy(16)).stats
        assert (stats.accepted, stats.drafted) == (wanted.accepted, wanted.drafted)
        assert (stats.acceptance_rate == 1) == (seed == 0)
    assert any(copy.compiled._programs.values()), "some pass ran by a program"


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_weights_that_do_not_fit_are_named(change: str) -> None:
    module = tiny_module("llama")
    weights = plain_weights(module)
    name = "model.norm.weight"
    if change == "missing":
        del weights[name]
    else:
        weights[name] = weights[name][:-1]
    with pytest.raises(IncompatibleError, match=r"draft: model\.norm\.weight should have shape"):
        staged(module, weights, "draft")


def test_quantized_weights_cannot_be_trained() -> None:
    module = tiny_module("llama")
    layer = module.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="load it without quantization"):
        plain_weights(module, "draft")


@needs_compiler
def test_the_packed_form_is_tested() -> None:
    layers = model("packed").module.modules()
    assert any(isinstance(each, NarrowLinear) and each.weight.ndim == 3 for each in layers)
