"""The planner's models, hardware and passes, against closed forms."""

import json
import math
from pathlib import Path
from typing import Any

import bench_cells
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from outrider.core.errors import InvalidParameterError
from outrider.lab.plan import (
    ACCELERATORS,
    Accelerator,
    MeasuredPasses,
    ModelSize,
    RooflinePasses,
    accelerator,
    model_size,
)
from outrider.lab.plan.measured import measured_alpha, measured_passes

GPU = Accelerator("test", memory=100e9, bandwidth=1e12, flops=100e12, link_bandwidth=1e11)
MODEL = ModelSize("m", 1e9, layers=10, width=1000, cache_width=400, kv_heads=4, attended=4000)


@pytest.mark.parametrize(
    ("name", "parameters", "layers"), [("70B", 70e9, 80), ("135m", 135e6, 30), ("1.5 B", 1.5e9, 16)]
)
def test_sizes_by_name(name: str, parameters: float, layers: int) -> None:
    size = model_size(name)
    assert size.parameters == parameters
    assert size.layers == layers
    assert size.num_bytes == 2 * parameters
    assert model_size(name, weight_bytes=0.5).num_bytes == parameters / 2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_a_configuration_are_those_of_the_model(
    tmp_path: Path, tied: bool, bias: bool
) -> None:
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    config.save_pretrained(tmp_path)
    size = model_size(str(tmp_path))
    model: Any = LlamaForCausalLM(config)
    assert size.parameters == sum(each.numel() for each in model.parameters())
    assert (size.layers, size.width, size.cache_width, size.kv_heads) == (3, 16, 16, 2)
    assert size.attended == 4 * 16
    assert size.cache_bytes(5) == 2 * 3 * 8 * 2 * 5
    assert model_size(str(tmp_path / "config.json")).parameters == size.parameters


def test_experts_are_read_as_far_as_tokens_touch_them(tmp_path: Path) -> None:
    values = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    size = model_size(str(tmp_path))
    assert size.expert == 3 * 8 * 16 * 2
    assert size.read_bytes(1) == pytest.approx(2 * (size.shared + 2 * size.expert))
    six = 8 * (1 - 0.75**6)
    assert size.read_bytes(6) == pytest.approx(2 * (size.shared + six * size.expert))
    assert size.operations(1, 0) == 2 * (size.shared + 2 * size.expert)
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_experts_per_tok": None}))
    with pytest.raises(InvalidParameterError, match="num_experts_per_tok=None"):
        model_size(str(tmp_path))


def test_a_shared_expert_with_a_gate_is_read_by_every_token(tmp_path: Path) -> None:
    config = Qwen2MoeConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    config.save_pretrained(tmp_path)
    size = model_size(str(tmp_path))
    assert size.parameters == num_parameters(config)
    assert size.expert == 3 * 16 * 12 * 3


SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 7,
    "v_head_dim": 9,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "n_group": 2,
    "topk_group": 1,
}


@pytest.mark.parametrize(
    "values",
    [
        {"q_lora_rank": 14},
        {"q_lora_rank": None},
        {"q_lora_rank": 14, "n_shared_experts": 1, "first_k_dense_replace": 0},
        {"q_lora_rank": None, "first_k_dense_replace": 5},
        {"q_lora_rank": 14, "tie_word_embeddings": True},
    ],
)
@pytest.mark.parametrize("kind", [DeepseekV2Config, DeepseekV3Config])
def test_parameters_of_latent_attention_and_experts_are_those_of_the_model(
    tmp_path: Path, kind: Any, values: dict[str, Any]
) -> None:
    config = kind(**SMALL | values)
    config.save_pretrained(tmp_path)
    size = model_size(str(tmp_path))
    assert size.parameters == num_parameters(config)
    assert size.cache_bytes(3) == 5 * (10 + 6) * 2 * 3
    assert size.cache_bytes(3, 4) == size.cache_bytes(3), "all GPUs need the compressed vectors"
    sparse = 5 - config.first_k_dense_replace
    assert size.expert == 3 * 32 * 12 * sparse
    assert (size.num_experts, size.per_token) == ((8, 2) if sparse else (1, 1))


def test_the_size_of_deepseek_v3(tmp_path: Path) -> None:
    """Published: 671B parameters, of which 37B are active for a token."""
    config = DeepseekV3Config()
    config.save_pretrained(tmp_path)
    size = model_size(str(tmp_path))
    assert size.parameters == num_parameters(config) == pytest.approx(671e9, rel=1e-3)
    active = size.shared + size.per_token * size.expert
    assert active == pytest.approx(37.5e9, rel=0.01)
    assert size.cache_bytes(1) == 61 * 576 * 2


def num_parameters(config: PretrainedConfig) -> int:
    """The parameters of a causal language model, which is not allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must be a number of parameters"),
        ("{", "cannot read"),
        ("[]", "no JSON object"),
        ('{"hidden_size": 3}', "num_hidden_layers=None"),
        (json.dumps(SMALL | {"v_head_dim": None}), "v_head_dim=None"),
    ],
)
def test_what_is_no_model(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidParameterError, match=message):
        model_size(str(tmp_path))
    with pytest.raises(InvalidParameterError, match="no parameters"):
        model_size("0B")


def test_hardware_by_name_and_by_numbers() -> None:
    assert accelerator("H100") is not None
    assert accelerator("h100", memory=5.0).memory == 5.0
    assert accelerator("h100", memory=5.0).bandwidth == ACCELERATORS["h100"].bandwidth
    mine = accelerator("mine", memory=1.0, bandwidth=2.0, flops=3.0, link_bandwidth=4.0)
    assert (mine.name, mine.flops) == ("mine", 3.0)
    with pytest.raises(InvalidParameterError, match=r"not a known GPU \(a100, .*missing: flops"):
        accelerator("mine", memory=1.0, bandwidth=2.0, link_bandwidth=1.0)
    with pytest.raises(InvalidParameterError, match="bandwidth=0: must be above 0"):
        accelerator("h100", bandwidth=0)
    with pytest.raises(InvalidParameterError, match="link_latency=-1"):
        accelerator("h100", link_latency=-1)


def test_a_pass_that_reads_and_one_that_computes() -> None:
    passes = RooflinePasses(MODEL, GPU, bandwidth_reached=0.5, flops_reached=0.25, layer_seconds=0)
    cache = 2 * 10 * 200 * 2 * 30
    assert passes.seconds(1, 1, 30) == pytest.approx((2e9 + cache) / 0.5e12)
    assert passes.seconds(3, 1, 30) == pytest.approx((2e9 + 3 * cache) / 0.5e12)
    operations = 1000 * (2e9 + 4 * 10 * 1000 * 30)
    assert passes.seconds(10, 100, 30) == pytest.approx(operations / 25e12)


def test_beta_is_one_until_the_pass_computes() -> None:
    passes = RooflinePasses(MODEL, GPU, bandwidth_reached=1, flops_reached=1, layer_seconds=0)
    ridge = 100e12 / 1e12  # operations per byte; a token takes one operation per byte of weights
    assert passes.seconds(1, 50, 0) == passes.seconds(1, 1, 0)
    wide = passes.seconds(1, 400, 0) / passes.seconds(1, 1, 0)
    assert wide == pytest.approx(400 / ridge)


@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_parallelism_divides_and_adds_two_sums_per_layer(degree: int) -> None:
    alone = RooflinePasses(MODEL, GPU, layer_seconds=0)
    shared = RooflinePasses(MODEL, GPU, degree, layer_seconds=0)
    moved = 2 * (degree - 1) / degree * 2000 / 1e11
    sums = 20 * (2 * math.log2(degree) * GPU.link_latency + moved)
    assert shared.seconds(1, 1, 10) == pytest.approx(alone.seconds(1, 1, 10) / degree + sums)


def test_key_value_heads_are_not_divided() -> None:
    assert MODEL.cache_bytes(7, 4) == MODEL.cache_bytes(7) / 4
    assert MODEL.cache_bytes(7, 8) == MODEL.cache_bytes(7, 4)


def test_measured_passes_are_taken_by_their_tokens(tmp_path: Path) -> None:
    passes = MeasuredPasses({1: 0.1, 4: 0.4})
    assert passes.seconds(2, 1, 99) == pytest.approx(0.2)
    assert passes.seconds(2, 4, 99) == pytest.approx(0.8)
    file = tmp_path / "profile.json"
    models = {name: {"pass_seconds": {"1": 0.1, "8": 0.2}} for name in ("target", "draft")}
    file.write_text(json.dumps({"models": models}))
    assert measured_passes(file)["draft"].times == {1: 0.1, 8: 0.2}
    for text in ("{", "{}", '{"models": {"draft": {"pass_seconds": {"1": 1}}}}'):
        file.write_text(text)
        with pytest.raises(InvalidParameterError, match="passes="):
            measured_passes(file)
    with pytest.raises(InvalidParameterError, match="times above 0"):
        MeasuredPasses({1: 0.0})


def test_measured_alpha(tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    plain, drafted = bench_cells.cell("plain"), bench_cells.cell("fast", alpha=0.8, gamma=4)

    def write(*cells: dict[str, Any]) -> None:
        file.write_text("".join(f"{json.dumps(each)}\n" for each in cells))

    write(plain, drafted)
    found, source = measured_alpha(file)
    assert found == drafted["speed"]["alpha"]
    assert source == f"measured, fast in {file}"
    rejected = bench_cells.cell("fast", alpha=0.8, gamma=4)
    rejected["speed"]["alpha"] = 0.0
    write(plain, drafted, rejected)
    assert measured_alpha(file)[0] == pytest.approx(found / 2)
    write(plain)
    with pytest.raises(InvalidParameterError, match="no measured cell there has drafts"):
        measured_alpha(file)
    write(plain, drafted, bench_cells.cell("other", alpha=0.5, gamma=2))
    with pytest.raises(InvalidParameterError, match=r"several methods .*fast 0\.\d+, other 0\.\d+"):
        measured_alpha(file)
