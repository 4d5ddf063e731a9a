"""Tiny ``transformers`` encoder-decoders with random weights; see also ``tiny_models``.

Encoders and decoders have different numbers of layers, so that tests notice if they are confused.

Legend: T decoder tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from tiny_models import DEVICE, VOCAB
from torch import Tensor
from transformers import PreTrainedModel

from outrider.runtime.hf.seq2seq import Seq2SeqModel

_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": None,
    "forced_eos_token_id": None,
}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

SEQ2SEQ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "t5_v1_1": ("T5Config", "T5ForConditionalGeneration", _T5 | _GATED),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", _T5),
    "marian": ("MarianConfig", "MarianMTModel", _BART),
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", _BART),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", _BART),
    "plbart": ("PLBartConfig", "PLBartForConditionalGeneration", _BART),
    "blenderbot": ("BlenderbotConfig", "BlenderbotForConditionalGeneration", _BART),
    "blenderbot-small": (
        "BlenderbotSmallConfig",
        "BlenderbotSmallForConditionalGeneration",
        _BART,
    ),
}


def tiny_seq2seq_module(
    family: str = "t5",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    std: float = 0.2,
    **overrides: Any,
) -> PreTrainedModel:
    """A random encoder-decoder, without an end-of-sequence token unless one is given."""
    config_name, model_name, settings = SEQ2SEQ[family]
    config = getattr(transformers, config_name)(**settings | overrides)
    module: PreTrainedModel = getattr(transformers, model_name)(config)
    head: Any = module.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # T5's configs cannot untie it
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:  # sinusoids stay what they are
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return module.to(DEVICE, dtype).eval()


def tiny_seq2seq(
    family: str = "t5", seed: int = 0, name: str = "model", **settings: Any
) -> Seq2SeqModel:
    """The same, ready to score."""
    return Seq2SeqModel(tiny_seq2seq_module(family, seed, **settings), name=name)


@torch.no_grad()
def decoder_logits(module: PreTrainedModel, source: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits of one forward pass over encoder and decoder tokens, without a cache, (T, V)."""
    return module(
        input_ids=torch.tensor([list(source)]),
        decoder_input_ids=torch.tensor([list(tokens)]),
        use_cache=False,
    ).logits[0]


def seq2seq_generate(
    module: PreTrainedModel, source: Sequence[int], num: int, **settings: Any
) -> tuple[int, ...]:
    """The greedy output of ``transformers`` for one source, without the start token.

    Without its cache, which in 5.23 has a layer per layer of T5's encoder, not of its decoder.
    """
    ids = torch.tensor([list(source)])
    done = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num,
        do_sample=False,
        num_beams=1,
        use_cache=False,
        **settings,
    )
    return tuple(done[0, 1:].tolist())
