"""A small T5 and its objectives: cross-entropy on pairs, and distillation from a target.

The architecture is T5 v1.1 (Raffel et al., 2020, https://arxiv.org/abs/1910.10683; gated GELU, no
dropout) with shared embeddings. Positions after a sequence's end token count in no loss.

The initialisation is T5's except for the relative position biases, which have a standard deviation
of 2. With it, heads attend to definite distances from the first step, and copying is learned
sooner. T5's own biases begin near 0, and a step changes them only by about the learning rate.

Shapes: B rows, S tokens of a source, T of a target sequence (a batch is
[B, S+T]), V vocabulary, N positions.
`p` target, `q` draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from outrider.train.losses import Divergence, Objective, cross_entropy, forward_kl
from outrider.train.pairs import END, PAD

_BIAS_STD = 2.0


@dataclass(frozen=True)
class T5Shape:
    """The sizes of a T5; encoder and decoder may differ in depth."""

    vocab_size: int
    hidden_size: int = 192
    intermediate_size: int = 384
    encoder_layers: int = 3
    decoder_layers: int = 3
    heads: int = 4

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden size {self.hidden_size} is not a multiple of {self.heads} heads; choose "
                "another number of heads"
            )


def build_t5(shape: T5Shape, seed: int) -> T5ForConditionalGeneration:
    """A freshly initialised float32 T5; the module describes the initialisation."""
    torch.manual_seed(seed)
    config_of: Any = T5Config  # its signature declares too few parameters
    config = config_of(
        vocab_size=shape.vocab_size,
        d_model=shape.hidden_size,
        d_kv=shape.hidden_size // shape.heads,
        d_ff=shape.intermediate_size,
        num_layers=shape.encoder_layers,
        num_decoder_layers=shape.decoder_layers,
        num_heads=shape.heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
    )
    model = T5ForConditionalGeneration(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("relative_attention_bias.weight"):
            torch.nn.init.normal_(parameter, std=_BIAS_STD)
    return model


def translation(model: T5ForConditionalGeneration, source_width: int) -> Objective:
    """Cross-entropy of each target sequence given its source."""

    def objective(tokens_BT: Tensor) -> Tensor:
        text_BT = tokens_BT[:, source_width:]
        logits_NV = _logits(model, tokens_BT, source_width)
        return cross_entropy(logits_NV, text_BT[text_BT != PAD])

    return objective


def translation_distillation(
    draft: T5ForConditionalGeneration,
    target: T5ForConditionalGeneration,
    source_width: int,
    divergence: Divergence = forward_kl,
) -> Objective:
    """The mean divergence of the draft from the frozen target over all target positions.

    Freezes the target.
    """
    target.requires_grad_(False).eval()

    def objective(tokens_BT: Tensor) -> Tensor:
        with torch.no_grad():
            p_logits_NV = _logits(target, tokens_BT, source_width)
        return divergence(p_logits_NV, _logits(draft, tokens_BT, source_width)).mean()

    return objective


def _logits(model: Any, tokens_BT: Tensor, source_width: int) -> Tensor:
    """Logits at the positions that predict a target token or the end token, (N, V)."""
    source_BS, text_BT = tokens_BT[:, :source_width], tokens_BT[:, source_width:]
    inputs_BT = torch.nn.functional.pad(text_BT[:, :-1], (1, 0), value=PAD)
    logits_BTV: Tensor = model(
        input_ids=source_BS,
        attention_mask=(source_BS != PAD).long(),
        decoder_input_ids=inputs_BT,
        use_cache=False,
    ).logits
    return logits_BTV[text_BT != PAD]
