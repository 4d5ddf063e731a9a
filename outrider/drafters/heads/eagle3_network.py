"""The network of an EAGLE-3 head: one decoder layer after the fused hidden states of the target.

Li, Wei, Zhang and Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025. https://arxiv.org/abs/2503.01840

    g_t  = fc [h_t of the chosen layers]                 a token that the target has read
    g_t  = the head's own feature before it              a drafted token
    a    = attention([norm(e(x_t+1)); norm(g_t)])        queries, keys and values of width 2H
    f_t  = g_t + a + mlp(norm(g_t + a))
    q    = softmax(head(norm(f_t)))                      over the draft vocabulary; predicts x_t+2

Decoder layers are those of Llama or of Qwen3, whose attention norms queries and keys per head.

The feature at t is read together with the token at t+1: the head knows which token was sampled
where the target's hidden state only knows the distribution. The next feature of a draft is f_t.

Names of the parameters are those of the ``speculators`` format. Options, as published checkpoints
have them:

    norm_before_residual   the residual is norm(g) where the paper has g
    norm_before_fc         one norm over the concatenated hidden states ahead of ``fc``
    fc_norm                one norm per layer there (EAGLE-3.1)
    norm_output            the next feature is norm(f) where the paper has f (EAGLE-3.1)
    mask_token_id          a P-EAGLE head (``peagle.py``): drafted tokens are read as this token,
                           and the hidden states before them as the trained ``mask_hidden``

Legend: B rows, N tokens, S slots, H width of the head, F width of the target times its chosen
layers, D draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from outrider.core.errors import ModelLoadError
from outrider.runtime.hf.rotary import RotaryEmbedding

LayerConfig = LlamaConfig | Qwen3Config


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of a head and of the target that it belongs to.

    Attributes:
        layer: the decoder layers' shape; its ``num_hidden_layers`` counts the head's layers and its
            ``vocab_size`` is the target's.
        draft_vocab_size: D.
        target_layers: layers of the target whose hidden states the head reads, numbered as in
            ``ForwardBatch.hidden_layers``.
        target_hidden_size: width of one of these hidden states.
        norm_before_residual, norm_before_fc, fc_norm, norm_output: as above.
        target_name: folder or hub id of the target that it was trained on.
        num_speculative_tokens: the draft length it was trained for.
        target_architectures: class names of that target.
        mask_token_id: as above; None for a head that drafts token by token.
    """

    layer: LayerConfig
    draft_vocab_size: int
    target_layers: tuple[int, ...]
    target_hidden_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    target_name: str | None = None
    num_speculative_tokens: int = 5
    target_architectures: tuple[str, ...] = ()
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ModelLoadError(
                "an EAGLE-3 head with norm_before_fc and fc_norm: it can have one of them only"
            )
        if not self.target_layers:
            raise ModelLoadError("an EAGLE-3 head reads the hidden states of at least one layer")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.layer.vocab_size:
            raise ModelLoadError(
                f"a P-EAGLE head with mask_token_id {self.mask_token_id}: its target has "
                f"{self.layer.vocab_size} tokens"
            )

    @property
    def fused_size(self) -> int:
        """F."""
        return self.target_hidden_size * len(self.target_layers)

    @property
    def kind(self) -> str:
        """``peagle`` with a mask token, else ``eagle3``."""
        return "eagle3" if self.mask_token_id is None else "peagle"

    @property
    def num_slots(self) -> int:
        """The longest draft of a P-EAGLE head."""
        return self.num_speculative_tokens

    @property
    def block_size(self) -> int:
        """Tokens of its pass: the root, and a mask token ahead of each drafted token but one."""
        return self.num_slots

    @property
    def has_confidence(self) -> bool:
        """Whether it predicts how probably each token is accepted."""
        return False


def default_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late layer, as the authors choose them; distinct ones of a target
    with few layers."""
    wanted = (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({min(max(layer, 1), num_layers) for layer in wanted}))


class FirstLayer(nn.Module):
    """The decoder layer that reads a token and a feature side by side. Mixed into a decoder layer
    of ``transformers``."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module

    def __init__(self, config: LayerConfig, *, norm_before_residual: bool) -> None:
        super().__init__(config, 0)
        self.norm_before_residual = norm_before_residual
        norm = FAMILIES[config.model_type].norm
        self.hidden_norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: nn.Linear = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, config.attention_bias)
            setattr(self.self_attn, name, wide)

    def forward(
        self,
        embedded_BNH: Tensor,
        feature_BNH: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        cache: Cache,
    ) -> Tensor:
        normed_BNH = self.hidden_norm(feature_BNH)
        residual_BNH = normed_BNH if self.norm_before_residual else feature_BNH
        read_BN2H = torch.cat([self.input_layernorm(embedded_BNH), normed_BNH], -1)
        attended_BNH, _ = self.self_attn(
            hidden_states=read_BN2H,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=cache,
        )
        residual_BNH = residual_BNH + attended_BNH
        output_BNH: Tensor = residual_BNH + self.mlp(self.post_attention_layernorm(residual_BNH))
        return output_BNH


class LlamaFirstLayer(FirstLayer, LlamaDecoderLayer):  # type: ignore[misc]  # two tensors
    """That of Llama."""


class Qwen3FirstLayer(FirstLayer, Qwen3DecoderLayer):  # type: ignore[misc]  # two tensors
    """That of Qwen3."""


class Family(NamedTuple):
    """What a head's network is made of.

    Attributes:
        config: describes the layers.
        first: the layer that reads tokens and features.
        layer: the layers after it.
        norm: of hidden states.
    """

    config: type[LayerConfig]
    first: type[FirstLayer]
    layer: type[nn.Module]
    norm: type[nn.Module]


FAMILIES = {
    "llama": Family(LlamaConfig, LlamaFirstLayer, LlamaDecoderLayer, LlamaRMSNorm),
    "qwen3": Family(Qwen3Config, Qwen3FirstLayer, Qwen3DecoderLayer, Qwen3RMSNorm),
}
"""By ``model_type`` of the layers."""
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
"""A head has no such tokens, while the configurations of ``transformers`` have some by default."""


class Eagle3Network(nn.Module):
    """The head's weights; the embedding is the target's, or its own where a checkpoint has one.

    Args:
        config: the shape.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        layer._attn_implementation = "sdpa"
        family = FAMILIES[layer.model_type]
        H, eps = layer.hidden_size, layer.rms_norm_eps
        self.fc = nn.Linear(config.fused_size, H, bias=False)
        first = family.first(layer, norm_before_residual=config.norm_before_residual)
        more = [family.layer(layer, i) for i in range(1, layer.num_hidden_layers)]
        self.layers = nn.ModuleList([first, *more])
        self.norm = family.norm(H, eps=eps)
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)
        self._rotary = RotaryEmbedding(layer)
        if config.norm_before_fc:
            self.input_norm = family.norm(config.fused_size, eps=eps)
        if config.fc_norm:
            norms = [family.norm(config.target_hidden_size, eps=eps) for _ in config.target_layers]
            self.fc_norm = nn.ModuleList(norms)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.fused_size))

    def fuse(self, hidden_BNF: Tensor) -> Tensor:
        """The features of tokens that the target has read, (B, N, H), from its hidden states."""
        if self.config.norm_before_fc:
            hidden_BNF = self.input_norm(hidden_BNF)
        if self.config.fc_norm:
            parts = hidden_BNF.chunk(len(self.fc_norm), -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            hidden_BNF = torch.cat(normed, -1)
        fused_BNH: Tensor = self.fc(hidden_BNF)
        return fused_BNH

    def forward(
        self,
        embedded_BNH: Tensor,
        feature_BNH: Tensor,
        positions_BN: Tensor,
        mask_BNS: Tensor,
        cache: Cache,
    ) -> Tensor:
        """The head's next features, (B, N, H).

        Args:
            embedded_BNH: embeddings of the tokens.
            feature_BNH: the feature of the position before each token.
            positions_BN: positions for the rotary embedding, which only uses their differences.
            mask_BNS: (B, 1, N, S), additive or Boolean, of the slots that the cache returns.
            cache: takes the keys and values of the tokens, and returns those of all slots.
        """
        rotary = self._rotary(positions_BN, embedded_BNH.dtype)
        first, *more = self.layers
        hidden_BNH: Tensor = first(embedded_BNH, feature_BNH, rotary, mask_BNS, cache)
        for layer in more:
            hidden_BNH = layer(
                hidden_BNH,
                attention_mask=mask_BNS,
                past_key_values=cache,
                position_embeddings=rotary,
            )
        if self.config.norm_output:
            hidden_BNH = self.norm(hidden_BNH)
        return hidden_BNH

    def logits(self, feature_BNH: Tensor) -> Tensor:
        """Logits over the draft vocabulary, (B, N, D), from what :meth:`forward` returned."""
        logits_BND: Tensor = self.lm_head(self.normed(feature_BNH))
        return logits_BND

    def normed(self, feature_BNH: Tensor) -> Tensor:
        """What the output layer reads, (B, N, H), from what :meth:`forward` returned."""
        normed_BNH: Tensor = feature_BNH if self.config.norm_output else self.norm(feature_BNH)
        return normed_BNH


def layer_config(values: dict[str, Any]) -> LayerConfig:
    """The decoder layer's configuration from a checkpoint's.

    Raises:
        ModelLoadError: an unknown family of layers, or layers with a sliding window.
    """
    kind = values.get("model_type", "llama")
    if kind not in FAMILIES:
        raise ModelLoadError(
            f"an EAGLE-3 head with layers of type {kind!r}: known here are {', '.join(FAMILIES)}"
        )
    config = FAMILIES[kind].config(**{**NO_TOKENS, **values})
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ModelLoadError(
            "an EAGLE-3 head with a sliding window: only full attention is known here"
        )
    return config
