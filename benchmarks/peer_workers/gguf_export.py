"""Exports a model folder of the Llama architecture to a GGUF file, for llama.cpp.

Follows llama.cpp's own converter (``conversion/llama.py``), which only accepts tokenizers that it
recognises by a hash. Rows of the query and key projections are interleaved, since llama.cpp rotates
neighbouring pairs and transformers rotates halves. Prompts are sent to peers as token ids, so only
the vocabulary and the merges of the tokenizer are exported, with the pre-tokenizer of GPT-2.

Needs ``gguf``, ``numpy`` and ``safetensors``, not torch.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors import safe_open

from benchmarks.peer_workers.protocol import Job, export_path

_KINDS = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (gguf.GGMLQuantizationType.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
}

_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def exported(job: Job, model: str, kind: str) -> Path:
    """The GGUF file of a job's model in a format, written the first time; see :func:`export`."""
    path = export_path(job, model, f"{kind}.gguf")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        export(Path(model), unfinished, kind)
        unfinished.rename(path)
    return path


def export(folder: Path, path: Path, kind: str = "f32") -> None:
    """Writes the model in ``folder`` to ``path``.

    Args:
        folder: ``config.json``, ``tokenizer.json`` and float32 safetensors.
        path: the GGUF file.
        kind: format of the matrices, the embeddings among them: ``f32``, ``f16``, ``bf16``, or
            blocks of 32 weights, ``q8_0``, ``q4_0`` or ``q4_1``; vectors stay float32.

    Raises:
        ValueError: another architecture, or scaled rotary embeddings.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"{config['architectures']}: only LlamaForCausalLM is exported to GGUF")
    if config["rope_parameters"]["rope_type"] != "default":
        raise ValueError(f"{config['rope_parameters']}: scaled rotary embeddings are not exported")
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, config, folder.name, kind)
    _vocabulary(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    for name, array in _tensors(folder, config):  # first all shapes, then all contents
        type_ = _type_of(array, kind)
        data = quantize(array, type_)
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, array in _tensors(folder, config):
        writer.write_tensor_data(quantize(array, _type_of(array, kind)))
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any], name: str, kind: str) -> None:
    head_dim = config["head_dim"]
    writer.add_name(name)
    writer.add_file_type(_KINDS[kind][1])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    names = {number: token for token, number in tokenizer["model"]["vocab"].items()} | special
    size = config["vocab_size"]
    types = [
        gguf.TokenType.CONTROL
        if number in special
        else gguf.TokenType.NORMAL
        if number in names
        else gguf.TokenType.UNUSED
        for number in range(size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    if (end := config.get("eos_token_id")) is not None:  # one number, or a list of them
        writer.add_eos_token_id(end[0] if isinstance(end, list) else end)
    writer.add_add_bos_token(False)


def _tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields llama.cpp's name and array of each tensor, one at a time."""
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in sorted(tensors.keys()):
                array = tensors.get_tensor(name)
                if (layer := _LAYER.fullmatch(name)) is None:
                    yield _WHOLE[name], array
                    continue
                number, part, kind = layer.groups()
                if part in ("self_attn.q_proj", "self_attn.k_proj"):
                    array = interleave(array, heads[part[len("self_attn.")]])
                yield f"blk.{number}.{_IN_LAYER[part]}.{kind}", array


def interleave(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorders the rows of every head from (first half, second half) to (pair, pair, …)."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _type_of(array: NDArray[np.float32], kind: str) -> gguf.GGMLQuantizationType:
    return _KINDS[kind][0] if array.ndim > 1 else gguf.GGMLQuantizationType.F32
