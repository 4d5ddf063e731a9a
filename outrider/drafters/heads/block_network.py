"""The networks of DFlash and DSpark: a block of draft tokens from one forward pass.

"DFlash: Block Diffusion for Flash Speculative Decoding", 2026, https://arxiv.org/abs/2602.06036;
"DSpark", DeepSeek, 2026, whose paper and code are https://github.com/deepseek-ai/DeepSpec.

    c_t   = hidden_norm(fc(hidden states of the target's layers at position t, side by side))
    x     = emb(root, MASK, …, MASK)                            the target's embeddings
    layer   queries from x; keys and values from [c_0 … c_{root-1}, x]; no mask within the block
    h     = norm(x)
    z_k   = head(h_k) + W2 W1[x_{k-1}]                          the second term in DSpark only
    a_k   = sigmoid(w · [h_k, W1[x_{k-1}]] + b)                 the confidence, in DSpark only

The layers are Qwen3's, but every layer reads the same c, which passes no layer norm. So the keys
and values of a position never change once the target has computed its hidden states, and a cache
keeps them. The root itself has no c: the target has not run over it.

Slot j of the block stands at the root's position plus j. Where the network samples from the anchor
(``sample_from_anchor``: DSpark), slot j predicts the token *after* that position, and a block of B
slots drafts B tokens. Where it does not (DFlash), slot j predicts the token *at* that position,
slot 0 predicts nothing, and B slots draft B - 1 tokens.

W1 is indexed by ids of the target, W2 leads to draft ids. The embeddings and the output head are
the target's and are not part of the network, save that a network with a reduced vocabulary has an
output head of its own.

Legend: B rows, T context length, N slots of the block, H hidden width, E width of the target's
hidden states side by side, A attention heads (of keys: fewer), C width of a head, S keys, V
vocabulary, D draft vocabulary, R Markov rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from outrider.core.errors import InvalidParameterError, UnsupportedModelError
from outrider.runtime.hf.rotary import RotaryEmbedding, Rotation

Remember = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""From the block's keys and values, (B, A, N, C) each, and the number of a layer to those that the
block reads, (B, A, S, C): those of the context, then its own."""


@dataclass(frozen=True)
class BlockConfig:
    """What a block network is built from.

    Attributes:
        layers: the config of its layers, Qwen3's; ``num_hidden_layers`` counts the network's own,
            and ``vocab_size`` is the target's.
        block_size: slots of the block, the root's included.
        mask_token_id: the token whose embedding stands for tokens to be drafted.
        target_layers: the layers of the target whose hidden states it reads, numbered as in
            ``ForwardBatch.hidden_layers``.
        target_hidden_size: width of one of these hidden states.
        draft_vocab_size: D; V where it drafts every token, by the target's output head.
        sample_from_anchor: whether the root's slot predicts the token after the root.
        markov_rank: R; 0 without the correction by the preceding token.
        has_confidence: whether it predicts how probably each token is accepted.
        confidence_reads_markov: whether the confidence reads ``W1[x_{k-1}]``.

    Raises:
        InvalidParameterError: numbers that no network can have; the message names them.
        UnsupportedModelError: layers with a sliding window.
    """

    layers: Qwen3Config
    block_size: int
    mask_token_id: int
    target_layers: tuple[int, ...]
    draft_vocab_size: int
    target_hidden_size: int
    sample_from_anchor: bool = False
    markov_rank: int = 0
    has_confidence: bool = False
    confidence_reads_markov: bool = False

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise InvalidParameterError(
                f"block_size={self.block_size}: a block drafts no token; take at least 2, or 1 "
                f"with sample_from_anchor"
            )
        if not 0 <= self.mask_token_id < self.num_tokens:
            raise InvalidParameterError(
                f"mask_token_id={self.mask_token_id}: must be one of the target's "
                f"{self.num_tokens} tokens"
            )
        if not self.target_layers:
            raise InvalidParameterError("target_layers is empty: name at least one layer")
        if self.has_confidence and self.confidence_reads_markov and not self.markov_rank:
            raise InvalidParameterError(
                "confidence_reads_markov needs markov_rank of at least 1, which is 0"
            )
        if "sliding_attention" in (self.layers.layer_types or ()):
            raise UnsupportedModelError(
                "a block head with sliding_attention layers: only full_attention is supported"
            )

    @property
    def num_tokens(self) -> int:
        """V."""
        return self.layers.vocab_size

    @property
    def has_own_output(self) -> bool:
        """Whether it has an output head of its own: for a reduced vocabulary."""
        return self.draft_vocab_size != self.num_tokens

    @property
    def kind(self) -> str:
        """``dspark`` with a Markov or a confidence head, else ``dflash``."""
        return "dspark" if self.markov_rank or self.has_confidence else "dflash"

    @property
    def first_slot(self) -> int:
        """The slot that predicts the root's successor."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_slots(self) -> int:
        """Slots that predict a token: the longest draft."""
        return self.block_size - self.first_slot


class MarkovHead(nn.Module):
    """The correction of a slot's logits by the token before it, of low rank.

    Args:
        num_tokens: V.
        num_draft_tokens: D.
        rank: R.
    """

    def __init__(self, num_tokens: int, num_draft_tokens: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(num_tokens, rank)
        self.markov_w2 = nn.Linear(rank, num_draft_tokens, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of the probability that a slot's token is accepted.

    Args:
        width: of what it reads.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class BlockNetwork(nn.Module):
    """The network of a DFlash or DSpark head; its parameters are named as in published files.

    Args:
        config: its sizes.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        layers = config.layers
        layers._attn_implementation = "sdpa"
        H, D, R = layers.hidden_size, config.draft_vocab_size, config.markov_rank
        E = len(config.target_layers) * config.target_hidden_size
        self.fc = nn.Linear(E, H, bias=False)
        self.hidden_norm = nn.RMSNorm(H, eps=layers.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(layers) for _ in range(layers.num_hidden_layers))
        self.norm = nn.RMSNorm(H, eps=layers.rms_norm_eps)
        self.lm_head = nn.Linear(H, D, bias=False) if config.has_own_output else None
        self.markov_head = MarkovHead(config.num_tokens, D, R) if R else None
        read = H + (R if config.confidence_reads_markov else 0)
        self.confidence_head = ConfidenceHead(read) if config.has_confidence else None
        self._rotary = RotaryEmbedding(layers)

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draws weights as a network to be trained starts with: normal ones, norms of 1, and
        corrections and confidences of 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
        if self.markov_head is not None:
            nn.init.zeros_(self.markov_head.markov_w2.weight)
        if self.confidence_head is not None:
            nn.init.zeros_(self.confidence_head.proj.weight)
            nn.init.zeros_(self.confidence_head.proj.bias)

    def context(self, hidden_BTE: Tensor) -> Tensor:
        """c, what the layers read of the target's hidden states, (B, T, H)."""
        context_BTH: Tensor = self.hidden_norm(self.fc(hidden_BTE))
        return context_BTH

    def context_keys_values(
        self, context_BTH: Tensor, position_BT: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the context by layer, (B, A, T, C) each."""
        rotate = self._rotary(position_BT, context_BTH.dtype)
        attentions = [cast(BlockLayer, layer).self_attn for layer in self.layers]
        return [each.keys_values(context_BTH, rotate) for each in attentions]

    def forward(
        self,
        noise_BNH: Tensor,
        position_BN: Tensor,
        remember: Remember,
        mask_BANS: Tensor | None = None,
    ) -> Tensor:
        """h, (B, N, H).

        Args:
            noise_BNH: embeddings of the root and the mask token.
            position_BN: positions of the slots.
            remember: adds the keys and values of the context.
            mask_BANS: which keys each slot attends to, bool or additive; None for all.
        """
        rotate = self._rotary(position_BN, noise_BNH.dtype)
        x_BNH = noise_BNH
        for number, layer in enumerate(self.layers):
            x_BNH = layer(x_BNH, rotate, remember, number, mask_BANS)
        h_BNH: Tensor = self.norm(x_BNH)
        return h_BNH

    def correction(self, previous: Tensor) -> Tensor | None:
        """``W2 W1[x_{k-1}]``, (…, D); None without a Markov head.

        Args:
            previous: the tokens before, (…), as ids of the target.
        """
        if self.markov_head is None:
            return None
        correction_D: Tensor = self.markov_head.markov_w2(self.markov_head.markov_w1(previous))
        return correction_D

    def confidence_logits(self, h_H: Tensor, previous: Tensor) -> Tensor:
        """The logits of a, (…). The network must have a confidence head.

        Args:
            h_H: the slots' outputs, (…, H).
            previous: the tokens before, (…), as ids of the target.
        """
        assert self.confidence_head is not None
        if self.config.confidence_reads_markov:
            assert self.markov_head is not None
            h_H = torch.cat([h_H, self.markov_head.markov_w1(previous)], -1)
        logits: Tensor = self.confidence_head.proj(h_H)[..., 0]
        return logits


class BlockLayer(nn.Module):
    """A decoder layer without a causal mask, whose attention also reads the context.

    Args:
        config: of the layer.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        x_BNH: Tensor,
        rotate: Rotation,
        remember: Remember,
        number: int,
        mask_BANS: Tensor | None,
    ) -> Tensor:
        read_BNH = self.input_layernorm(x_BNH)
        x_BNH = x_BNH + self.self_attn(read_BNH, rotate, remember, number, mask_BANS)
        y_BNH: Tensor = x_BNH + self.mlp(self.post_attention_layernorm(x_BNH))
        return y_BNH


class BlockAttention(nn.Module):
    """Attention of the slots to the context and to each other.

    Args:
        config: of the layer.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        H, C, bias = config.hidden_size, config.head_dim, config.attention_bias
        num_key_heads = config.num_key_value_heads or config.num_attention_heads
        self.head_width = C
        self.q_proj = nn.Linear(H, config.num_attention_heads * C, bias=bias)
        self.k_proj = nn.Linear(H, num_key_heads * C, bias=bias)
        self.v_proj = nn.Linear(H, num_key_heads * C, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * C, H, bias=bias)
        self.q_norm = nn.RMSNorm(C, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(C, eps=config.rms_norm_eps)

    def keys_values(self, x_BTH: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values of the context or of the slots, (B, A, T, C) each."""
        key_BTAC = self.k_norm(self.k_proj(x_BTH).unflatten(-1, (-1, self.head_width)))
        value_BTAC = self.v_proj(x_BTH).unflatten(-1, (-1, self.head_width))
        return rotate(key_BTAC.transpose(1, 2)), value_BTAC.transpose(1, 2)

    def forward(
        self,
        x_BNH: Tensor,
        rotate: Rotation,
        remember: Remember,
        number: int,
        mask_BANS: Tensor | None,
    ) -> Tensor:
        query_BNAC = self.q_norm(self.q_proj(x_BNH).unflatten(-1, (-1, self.head_width)))
        query_BANC = rotate(query_BNAC.transpose(1, 2))
        key_BASC, value_BASC = remember(*self.keys_values(x_BNH, rotate), number)
        found_BANC = scaled_dot_product_attention(
            query_BANC, key_BASC, value_BASC, mask_BANS, enable_gqa=True
        )
        y_BNH: Tensor = self.o_proj(found_BANC.transpose(1, 2).flatten(2))
        return y_BNH
