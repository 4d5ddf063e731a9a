"""Layers keep the blocks of a GGUF file: the same weights as its own reader gives, to the bit."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_module
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.errors import (
    InvalidParameterError,
    ModelLoadError,
    OutriderWarning,
    UnsupportedModelError,
)
from outrider.runtime import load_model
from outrider.runtime.executors.prepare import prepare
from outrider.runtime.hf import support
from outrider.runtime.hf.gguf_blocks import KINDS, keep_blocks, read_blocks
from outrider.runtime.kernels import NarrowLinear
from outrider.runtime.kernels.build import find_compiler
from outrider.runtime.kernels.grouped import GroupedLinear

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="needs the extra gguf")

Type = gguf.GGMLQuantizationType
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of converted files; compiled kernels stay where they are."""
    monkeypatch.setattr("outrider.runtime.hf.gguf.cache_folder", lambda: tmp_path / "cache")


def written(folder: Path, kind: str, tied: bool = False) -> Path:
    """A GGUF file of a tiny Llama with grouped-query attention, whose matrices have one format."""
    from benchmarks.peer_workers.gguf_export import export

    module = tiny_module("llama", intermediate_size=64, tie_word_embeddings=tied, std=0.1)
    module.save_pretrained(folder / "model")
    words = {"a": 0, "b": 1, "ab": 2}
    tokenizer = {"added_tokens": [], "model": {"vocab": words, "merges": [["a", "b"]]}}
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    export(folder / "model", folder / "tiny.gguf", kind.lower())
    return folder / "tiny.gguf"


def reader_weights(file: Path) -> dict[str, Tensor]:
    """What the file's own reader dequantises, in float32."""
    return {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(file).tensors
    }


def heads_apart(weight_NK: Tensor, heads: int) -> Tensor:
    """Rows of rotated pairs, as llama.cpp has them, in the order of transformers: for each head
    the first of every pair, then the second."""
    pairs = weight_NK.view(heads, -1, 2, weight_NK.shape[1])
    return torch.cat((pairs[:, :, 0], pairs[:, :, 1]), 1).reshape(weight_NK.shape)


def kept_weight(layer: nn.Module) -> Tensor:
    """The weights that a layer computes with, as its outputs for the rows of the identity."""
    assert isinstance(layer, NarrowLinear | GroupedLinear)
    with torch.inference_mode():
        return layer(torch.eye(layer.in_features)).T


@kinds
def test_blocks_are_read_as_their_reader_reads_them(kind: str) -> None:
    """All bytes that a block may have, but for scales and offsets that are not finite."""
    generator = np.random.default_rng(0)
    size = gguf.GGML_QUANT_SIZES[Type[kind]][1]
    blocks = generator.integers(0, 256, (7, 5, size), dtype=np.uint8)
    halves = generator.uniform(-300, 300, (7, 5, 2)).astype(np.float16).view(np.uint8)
    blocks[..., :4] = halves if kind == "Q4_1" else blocks[..., :4]
    blocks[..., :2] = halves[..., :2]
    rows = blocks.reshape(7, -1)
    weight = read_blocks(kind, torch.from_numpy(rows))
    theirs = torch.from_numpy(gguf.dequantize(rows, Type[kind]))
    assert torch.equal(weight.dequantized(), theirs)
    assert torch.equal(kept_weight(GroupedLinear(weight, None)), theirs)


@kinds
@pytest.mark.parametrize("tied", [False, True])
def test_layers_have_the_weights_of_the_file(kind: str, tied: bool, tmp_path: Path) -> None:
    """To the bit, though the converted folder rounds them to bfloat16; a head without a tensor of
    its own has those of the embeddings."""
    file = written(tmp_path, kind, tied)
    model = load_model(file, dtype="float32", quantized="keep")
    theirs, module = reader_weights(file), model.module
    config = module.config
    for number, layer in enumerate(module.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for name, part, heads in (
            ("attn_q", attention.q_proj, config.num_attention_heads),
            ("attn_k", attention.k_proj, config.num_key_value_heads),
        ):
            wanted = heads_apart(theirs[f"blk.{number}.{name}.weight"], heads)
            assert torch.equal(kept_weight(part), wanted)
        for name, part in (
            ("attn_v", attention.v_proj),
            ("attn_output", attention.o_proj),
            ("ffn_gate", mlp.gate_proj),
            ("ffn_up", mlp.up_proj),
            ("ffn_down", mlp.down_proj),
        ):
            assert torch.equal(kept_weight(part), theirs[f"blk.{number}.{name}.weight"])
    head = theirs["token_embd.weight" if tied else "output.weight"]
    assert torch.equal(kept_weight(module.lm_head), head)
    assert type(module.get_input_embeddings()) is nn.Embedding


@torch.inference_mode()
@kinds
def test_logits_are_near_those_of_the_converted_model(kind: str, tmp_path: Path) -> None:
    """Which has the same weights but for their rounding to bfloat16, 2**-9 of each."""
    file = written(tmp_path, kind)
    kept = load_model(file, dtype="float32", quantized="keep")
    converted = load_model(file, dtype="float32")
    ours, theirs = (model.logits_after([5, 6, 7, 8], [9]) for model in (kept, converted))
    assert 0 < float((ours - theirs).norm() / theirs.norm()) < 2.0**-6


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["keep", "keep+a8"])
def test_a_model_of_blocks_can_be_exact(kind: str, dtype: str, tmp_path: Path) -> None:
    """Preparing compares forward passes of different widths, bit for bit."""
    model = load_model(written(tmp_path, "Q4_1"), dtype=dtype, quantized=kind)
    prepare(model, exact=True)
    assert model.exact


def test_layers_in_other_formats_stay_in_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.peer_workers import gguf_export

    own = gguf_export._type_of

    def type_of(array: Any, kind: str) -> Any:
        return Type.Q5_0 if array.shape[-1] == 64 else own(array, kind)

    monkeypatch.setattr(gguf_export, "_type_of", type_of)
    file = written(tmp_path, "Q8_0")
    with pytest.warns(OutriderWarning, match=r"stay in bfloat16, such as .*down_proj \(Q5_0 in"):
        model = load_model(file, dtype="bfloat16", quantized="keep")
    (mlp, *_) = (layer.mlp for layer in model.module.model.layers)
    assert type(mlp.down_proj) is nn.Linear
    assert type(mlp.up_proj) is not nn.Linear


def test_a_layer_whose_weights_are_not_the_files_keeps_its_own(tmp_path: Path) -> None:
    """As those of an architecture whose tensors the reader changes otherwise."""
    file = written(tmp_path, "Q8_0")
    module = load_model(file, dtype="float32").module
    layer = module.model.layers[0].mlp.up_proj
    with torch.no_grad():
        layer.weight[3] += 1
    with pytest.warns(OutriderWarning, match="1 of .* such as model.layers.0.mlp.up_proj"):
        keep_blocks(module, file)
    assert module.model.layers[0].mlp.up_proj is layer


def test_a_layer_whose_weight_the_model_reads_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(support._WEIGHTS_READ, "llama", ("mlp.down_proj",))
    model = load_model(written(tmp_path, "Q8_0"), dtype="float32", quantized="keep")
    (mlp, *_) = (layer.mlp for layer in model.module.model.layers)
    assert type(mlp.down_proj) is nn.Linear
    assert type(mlp.up_proj) is not nn.Linear


def test_files_without_blocks_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "F16")
    message = r"no linear layer in Q8_0, Q4_0, Q4_1 whose blocks could be kept.* in F16"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(file, quantized="keep", role="draft")


def test_an_architecture_without_names_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "Q8_0")
    module = load_model(file, dtype="float32").module
    module.config.model_type = "ouroboros"
    with pytest.raises(UnsupportedModelError, match=r"model: .*ouroboros.* blocks cannot be kept"):
        keep_blocks(module, file)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelLoadError, match=r"pip install 'outrider\[gguf\]'"):
        keep_blocks(tiny_module("llama"), tmp_path / "x.gguf")


def test_only_gguf_files_have_blocks_to_keep(tmp_path: Path) -> None:
    module: PreTrainedModel = tiny_module("llama")
    module.save_pretrained(tmp_path / "model")
    for source, kind in ((tmp_path / "model", "keep"), (module, "keep+a8")):
        with pytest.raises(InvalidParameterError, match="keeps the blocks of a GGUF file") as error:
            load_model(source, quantized=kind)
        assert repr(kind) in str(error.value)
