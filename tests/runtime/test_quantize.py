"""Quantized weights: near the model they came from, a distribution of their own, refused by name
and reason.

Legend: B rows, T tokens, V vocabulary.
"""

import copy
import sys
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, tiny_module, token_ids
from tiny_recurrent import tiny_recurrent_module
from tiny_seq2seq import tiny_seq2seq_module
from torch import Tensor, nn

import outrider
from outrider import Sampling, load_model
from outrider.core import Budget, Context
from outrider.core.errors import (
    InvalidParameterError,
    KernelError,
    OutriderWarning,
    UnsupportedModelError,
)
from outrider.drafters import ModelDrafter
from outrider.methods.hybrid import num_parameters
from outrider.runtime.executors.prepare import prepare
from outrider.runtime.hf.int8_linear import Int8Linear
from outrider.runtime.hf.quantize import MissingTorchaoError, quantize
from outrider.runtime.kernels import NarrowLinear, use_kernels
from outrider.runtime.kernels import layers as kernels_layers
from outrider.runtime.kernels.build import find_compiler
from outrider.runtime.kernels.grouped import GroupedLinear
from outrider.sampling import Warp

torchao = pytest.importorskip("torchao.quantization")

# Norm of what rounding changes in a random layer's results, as a share of them: uniform errors of
# half a step, of 127 steps (int8) or 15 (int4) to the largest of weights, give 0.7 and 8 %.
_BOUNDS = {"int8": 0.015, "int4": 0.12}
_FITTING = ["llama", "opt", "gpt_neox", "gemma2"]


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Int8Linear)


def _format(layer: nn.Module) -> tuple[int, int]:
    """Bits and inputs per group of a layer, from how it is packed or from its plain code."""
    if isinstance(layer, GroupedLinear):
        return layer.bits, layer.grouped.group
    assert isinstance(layer, NarrowLinear)
    group = layer.in_features // layer.weight.shape[1]
    return (8 if layer.weight.shape[2] > group else 4), group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_an_int8_layer_is_near_its_layer(tokens: int, dtype: torch.dtype) -> None:
    layer = nn.Linear(64, 48, dtype=dtype)
    x = torch.randn(2, tokens, 64, dtype=dtype)
    result = Int8Linear(layer, torchao)(x)
    assert result.dtype == dtype
    assert _distance(result.float(), layer(x).float()) < _BOUNDS["int8"]


def test_an_int8_layer_multiplies_what_torchao_rounded() -> None:
    layer = nn.Linear(64, 48, bias=False)
    rounded = copy.deepcopy(layer)
    torchao.quantize_(rounded, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    x = torch.randn(5, 64)
    assert _distance(Int8Linear(layer, torchao)(x), rounded(x)) < 2**-8  # bfloat16's share


@torch.inference_mode()
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("bias", [True, False])
def test_kernels_multiply_the_same_weights_without_rounding_the_inputs(bias: bool) -> None:
    """In float32 and bfloat16, for a number of outputs that fills no panel, with the same bits at
    any width."""
    layer = Int8Linear(nn.Linear(64, 53, bias), torchao)
    weight_NK = layer.weight.double() * layer.scale_N.double()[:, None]
    x = torch.randn(30, 64)
    wanted = x.double() @ weight_NK.T + (0 if layer.bias is None else layer.bias)
    use_kernels(layer)
    result = layer(x)
    assert _distance(result, wanted) < 1e-6
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), result)
    assert torch.equal(torch.cat([layer(part) for part in x.split(7)]), result)
    assert _distance(layer(x.bfloat16()).float(), wanted) < 2**-7


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
def test_a_quantized_model_can_be_exact() -> None:
    """Its text is the one that torch's kernels write, up to their rounding to bfloat16; passes of
    every width have the same bits, which preparing it tries."""
    quantized = load_model(tiny_module(std=0.1), quantized="int8")
    before = quantized.logits_after([5, 6, 7, 8], [9])
    prepare(quantized, exact=True)
    assert all(
        type(each) is NarrowLinear for each in quantized.module.modules() if _is_linear(each)
    )
    assert _distance(quantized.logits_after([5, 6, 7, 8], [9]), before) < 2**-6


@pytest.mark.parametrize("family", _FITTING)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_logits_of_a_quantized_model_are_near(family: str, kind: str) -> None:
    module = tiny_module(family, intermediate_size=64, std=0.1)
    tokens_BT = torch.randint(5, VOCAB, (2, 12))
    with torch.inference_mode():
        logits_BTV = module(input_ids=tokens_BT).logits
        quantized = quantize(copy.deepcopy(module), kind)
        distance = _distance(quantized(input_ids=tokens_BT).logits, logits_BTV)
    assert 0 < distance < 3 * _BOUNDS[kind]  # layers add up


def test_the_head_is_int8_and_leaves_shared_embeddings_alone() -> None:
    module = tiny_module("llama", tie_word_embeddings=True)
    before = module.get_input_embeddings().weight.clone()
    quantize(module, "int4")
    layers: Any = module.model.layers
    assert _format(layers[0].self_attn.q_proj) == (4, 32)
    assert _format(layers[0].mlp.down_proj) == (8, 48)  # 48 inputs are not in groups of 32
    assert _format(module.lm_head) == (8, 32)
    assert module.get_input_embeddings().weight.equal(before)


@pytest.mark.parametrize(
    ("kind", "wide", "narrow"),
    [
        ("int8:32", (8, 32), (8, 32)),
        ("int8:128", (8, 128), (8, 32)),
        ("int4:128", (4, 128), (4, 32)),
    ],
)
def test_groups_of_other_sizes(kind: str, wide: tuple[int, int], narrow: tuple[int, int]) -> None:
    """Layers that groups of 128 do not divide get groups of 32."""
    module = tiny_module("llama", intermediate_size=128)
    quantize(module, kind)
    layers: Any = module.model.layers
    assert _format(layers[0].mlp.down_proj) == wide
    assert _format(layers[0].mlp.up_proj) == narrow


@pytest.mark.parametrize("kind", ["int8:32+a8", "int4+a8"])
def test_layers_round_their_inputs_where_groups_allow(kind: str) -> None:
    """48 inputs are no multiple of 32."""
    module = tiny_module("llama", std=0.1)
    tokens_BT = torch.randint(5, VOCAB, (2, 12))
    plain, rounding = copy.deepcopy(module), copy.deepcopy(module)
    with torch.inference_mode():
        weights_only = quantize(plain, kind.removesuffix("+a8"))(input_ids=tokens_BT).logits
        found = quantize(rounding, kind)(input_ids=tokens_BT).logits
    layers: Any = rounding.model.layers
    assert layers[0].self_attn.q_proj.weight.ndim == 5
    assert layers[0].mlp.down_proj.weight.ndim == 4
    assert 0 < _distance(found, weights_only) < 0.05


def test_weights_beyond_the_scales_are_refused() -> None:
    module = tiny_module("llama")
    with torch.no_grad():
        module.lm_head.weight[3, 4] = 1e8
    with pytest.raises(UnsupportedModelError, match=r"to int4: weights up to 1e\+08 are beyond"):
        quantize(module, "int4")


def test_without_a_compiler_the_plain_code_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And gives the same logits, but for the order of sums."""
    module = tiny_module("llama", std=0.1)
    tokens_BT = torch.randint(5, VOCAB, (2, 12))
    with torch.inference_mode():
        logits_BTV = quantize(copy.deepcopy(module), "int4")(input_ids=tokens_BT).logits
        error = KernelError("no C++ compiler here")
        monkeypatch.setattr(kernels_layers, "load_kernels", Mock(side_effect=error))
        with pytest.warns(OutriderWarning, match="which is slow: no C\\+\\+ compiler here"):
            plain = quantize(module, "int4", "draft")
        assert _distance(plain(input_ids=tokens_BT).logits, logits_BTV) < 1e-5


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:.*recurrent model, which is not compiled")
@pytest.mark.parametrize("kind", ["int8", "int8:32"])
@pytest.mark.parametrize(
    ("family", "read"),
    [
        ("falcon_mamba", ("layers.0.mixer.dt_proj", "lm_head")),
        ("jamba", ("layers.0.mamba.dt_proj",)),
        ("mamba", ("layers.0.mixer.dt_proj", "lm_head")),
        ("mamba2", ("lm_head",)),
        ("rwkv", ("blocks.0.attention.output", "blocks.0.feed_forward.value")),
        ("xlstm", ("lm_head",)),
    ],
)
def test_layers_whose_weights_the_model_reads_stay(
    family: str, read: tuple[str, ...], kind: str
) -> None:
    """Integers in their place would fail, or make integers of a head's inputs."""
    ranks = {"jamba": "mamba_dt_rank", "mamba": "time_step_rank", "falcon_mamba": "time_step_rank"}
    sizes = {ranks[family]: 16} if family in ranks else {}
    module = tiny_recurrent_module(family, std=0.1, **sizes)
    (logits_NV,) = load_model(copy.deepcopy(module)).logits_within([5, 6, 7, 8, 9])
    quantized = load_model(module, quantized=kind)
    assert _distance(next(quantized.logits_within([5, 6, 7, 8, 9])), logits_NV) < 0.1
    kept = {name for name, each in quantized.module.named_modules() if type(each) is nn.Linear}
    for path in read:
        assert any(name.endswith(path) for name in kept), path
    prepare(quantized, compile="auto")
    assert _distance(next(quantized.logits_within([5, 6, 7, 8, 9])), logits_NV) < 0.1


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders_are_quantized(family: str) -> None:
    module = tiny_seq2seq_module(family)
    tokens = torch.randint(5, 50, (1, 9))
    with torch.inference_mode():
        logits = module(input_ids=tokens, decoder_input_ids=tokens).logits
        quantize(module, "int8")
        near = module(input_ids=tokens, decoder_input_ids=tokens).logits
    assert 0 < _distance(near, logits) < 0.1
    assert all(type(each) is not nn.Linear for each in module.modules())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_draft_leaves_greedy_texts_alone(kind: str) -> None:
    target, draft = tiny_module(seed=1), tiny_module(seed=1, intermediate_size=48)
    prompts = [[7, 11, 13], [40, 41, 42, 43, 44, 45]]
    sampling = Sampling(temperature=0, max_new_tokens=24)
    plain = outrider.load(target, None, "plain").generate(prompts, sampling)
    engine = outrider.load(target, draft, num_speculative_tokens="fixed", quantize_draft=kind)
    results = engine.generate(prompts, sampling)
    assert token_ids(results) == token_ids(plain)
    assert results.stats.accepted > 0


def test_the_recorded_q_is_the_quantized_models_own() -> None:
    """What is drawn from and what is recorded are one distribution, so verification stays exact."""
    module = tiny_module(std=0.1)
    quantized = load_model(module, quantized="int4")
    prompt = [5, 6, 7, 8]
    context = Context.start([prompt], Warp([Sampling()], VOCAB), [0], [0])
    drafter = ModelDrafter(quantized, VOCAB)
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(context), context, Budget(3), context.rng)
        assert draft.probs_BNV is not None
        for n in range(3):
            text = draft.tokens_BN[0, 1 : n + 1].tolist()
            own, other = (
                model.logits_after(prompt, text).softmax(-1)
                for model in (quantized, load_model(module))
            )
            assert (draft.probs_BNV[0, n] - own).abs().max() < 1e-4
            assert (draft.probs_BNV[0, n] - other).abs().max() > 1e-3


def test_quantized_weights_count_as_parameters() -> None:
    """Models are compared by their sizes, one of them quantised and the other not."""
    model = load_model(tiny_module("llama"))
    assert num_parameters(load_model(model, quantized="int8")) >= num_parameters(model)


def test_a_model_in_memory_is_copied() -> None:
    module = tiny_module()
    quantized = load_model(module, quantized="int8")
    assert quantized.module is not module
    assert type(module.lm_head) is nn.Linear
    again = load_model(load_model(module), quantized="int8")
    assert type(again.module.lm_head) is Int8Linear


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_models_whose_weights_are_elsewhere_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"draft .{FAMILIES[family][1]}.* hold [0-9,]+"):
        quantize(tiny_module(family), "int8", "draft")


def test_what_torchao_refuses_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("no such thing\nand more")

    monkeypatch.setattr(torchao.Int8Tensor, "from_hp", refuse)
    with pytest.raises(UnsupportedModelError, match=r"quantize draft .Llama.* to int8: no such th"):
        quantize(tiny_module(), "int8", "draft")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_second_time_is_refused(kind: str) -> None:
    module = quantize(tiny_module(), kind)
    with pytest.raises(UnsupportedModelError, match=r"model .Llama.* is quantized already"):
        quantize(module, "int8")


def test_bad_values_are_refused_before_loading() -> None:
    with pytest.raises(InvalidParameterError, match="quantize_draft='int5': must be one of int8"):
        outrider.load("/none", quantize_draft="int5")
    with pytest.raises(InvalidParameterError, match="quantize_draft='int8': method 'plain' has no"):
        outrider.load(method="plain", quantize_draft="int8")
    with pytest.raises(InvalidParameterError, match=r"'keep' keeps the blocks of a GGUF file"):
        load_model(tiny_module(), quantized="keep")
    with pytest.raises(InvalidParameterError, match=r"torch.float64 weights, which int8 .* use"):
        quantize(tiny_module(dtype=torch.float64), "int8")


def test_without_torchao_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(MissingTorchaoError, match=r'pip install "outrider\[quantize\]"'):
        load_model(tiny_module(), quantized="int8")
