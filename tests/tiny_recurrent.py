"""Tiny random models with recurrent layers, one per family."""

from typing import Any

import torch
import transformers
from tiny_models import DEVICE, VOCAB
from transformers import PreTrainedModel

from outrider.runtime import RecurrentModel

_ATTENTION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
_MAMBA = {"state_size": 4, "conv_kernel": 4, "expand": 2, "time_step_rank": 4, "hidden_size": 32}
_MAMBA2 = {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 4} | {
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_ALTERNATING = ["linear_attention", "full_attention", "linear_attention"]

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", "MambaForCausalLM", _MAMBA),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", _MAMBA),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        _ATTENTION
        | {
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "zamba": (
        "ZambaConfig",
        "ZambaForCausalLM",
        _ATTENTION
        | {
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "hidden_size": 32,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        _ATTENTION | _MAMBA2 | {"attn_layer_indices": [1]},
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        _ATTENTION | _MAMBA2 | {"mamba_d_ssm": 64},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        _ATTENTION
        | _MAMBA2
        | {
            "layers_block_type": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        _ATTENTION
        | {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "num_hidden_layers": 4,
            "ssm_state_size": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        "Zamba2ForCausalLM",
        _ATTENTION
        | {
            "mamba_d_state": 4,
            "mamba_ngroups": 2,
            "n_mamba_heads": 4,
            "mamba_expand": 2,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "num_mem_blocks": 1,
            "hybrid_layer_ids": [1],
            "adapter_rank": 4,
            "attention_head_dim": 16,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        _ATTENTION | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        _ATTENTION
        | _EXPERTS
        | {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "num_dense_layers": 1,
        },
    ),
    "lfm3": (
        "Lfm3Config",
        "Lfm3ForCausalLM",
        _ATTENTION | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _ATTENTION
        | _EXPERTS
        | _DELTA
        | {"layer_types": _ALTERNATING, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        _ATTENTION | _DELTA | {"layer_types": _ALTERNATING},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        _ATTENTION
        | _EXPERTS
        | _DELTA
        | {"layer_types": _ALTERNATING, "shared_expert_intermediate_size": 16},
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        _ATTENTION | _DELTA | {"layer_types": _ALTERNATING},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        _ATTENTION
        | {
            "num_key_value_heads": 4,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        _ATTENTION
        | {
            "lru_width": 32,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention", "recurrent"],
        },
    ),
    "rwkv": (
        "RwkvConfig",
        "RwkvForCausalLM",
        {"hidden_size": 32, "intermediate_size": 48, "rescale_every": 1},
    ),
    "xlstm": (
        "xLSTMConfig",
        "xLSTMForCausalLM",
        {
            "hidden_size": 128,
            "num_heads": 4,
            "num_blocks": 3,
            "chunk_size": 8,
            "mode": "inference",
            "autocast_kernel_dtype": "float32",
            "max_inference_chunksize": 8,
        },
    ),
}


def tiny_recurrent_module(
    family: str, seed: int = 0, std: float = 0.3, **overrides: Any
) -> PreTrainedModel:
    """A random model of a family, without an end-of-sequence token unless one is given."""
    config_name, model_name, settings = FAMILIES[family]
    special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    shared = {"vocab_size": VOCAB, "num_hidden_layers": 3, "tie_word_embeddings": False}
    config = getattr(transformers, config_name)(**shared | special | settings | overrides)
    torch.manual_seed(seed)
    module: PreTrainedModel = getattr(transformers, model_name)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1 and "A_log" not in name:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return module.to(DEVICE).eval()


def tiny_recurrent(
    family: str, seed: int = 0, name: str = "model", **settings: Any
) -> RecurrentModel:
    """The same, ready to score."""
    return RecurrentModel(tiny_recurrent_module(family, seed, **settings), name=name)
