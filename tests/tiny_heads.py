"""Random EAGLE-3 heads for tiny targets, their network in plain torch, and rounds driven by hand.

Legend: T tokens, H width of the head, F fused width, V vocabulary, D draft vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import tiny
from torch import Tensor

from outrider.core import Context, Distribution
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.eagle3 import Eagle3Head
from outrider.drafters.heads.eagle3_network import (
    FAMILIES,
    Eagle3Config,
    Eagle3Network,
    LayerConfig,
)
from outrider.drafters.heads.fused_draft import HeadExecutor
from outrider.drafters.heads.medusa import MedusaHead
from outrider.drafters.heads.medusa_network import MedusaConfig, MedusaNetwork
from outrider.drafters.heads.peagle import PEagleHead
from outrider.runtime import HFModel


class CountedHeadExecutor(HeadExecutor):
    """Counts the fused drafts, of all executors."""

    calls = 0

    def draft_after(self, *arguments: Any) -> Any:
        found = super().draft_after(*arguments)
        type(self).calls += found is not None
        return found


def target_of(vocab_size: int = 23, **settings: Any) -> HFModel:
    """A random target of four layers."""
    return tiny(vocab_size=vocab_size, num_hidden_layers=4, name="target", **settings)


def tiny_head(
    target: HFModel,
    draft_vocab_size: int | None = None,
    seed: int = 7,
    layers: int = 1,
    family: str = "llama",
    **options: Any,
) -> Eagle3Head:
    """A random head; its draft vocabulary takes every token but the first ones of the target."""
    width, V = target.module.config.get_text_config().hidden_size, target.num_tokens
    D = V if draft_vocab_size is None else draft_vocab_size
    read = tuple(range(1, min(target.num_layers, 3) + 1))
    layer = FAMILIES[family].config(
        vocab_size=V,
        hidden_size=width,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    network = Eagle3Network(Eagle3Config(layer, D, read, width, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.ndim > 1 else 1 + 0.3 * noise)
    return Eagle3Head(network, DraftVocabulary(torch.arange(V - D, V), V), "tiny head")


def peagle_head(
    target: HFModel, draft_vocab_size: int | None = None, num_tokens: int = 3
) -> PEagleHead:
    """A random P-EAGLE head that drafts so many tokens; the mask is the target's last token."""
    mask = target.num_tokens - 1
    options = {"num_speculative_tokens": num_tokens, "mask_token_id": mask}
    head = tiny_head(target, draft_vocab_size, **options)
    return PEagleHead(head.network, head.vocabulary, head.name)


@torch.no_grad()
def hidden_states(target: HFModel, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """The target's hidden states at every token by one pass of ``transformers``, (T, F)."""
    output = target.module(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True)
    return torch.cat([output.hidden_states[layer][0] for layer in layers], -1)


@torch.no_grad()
def reference_logits(
    head: Eagle3Head, target: HFModel, tokens: Sequence[int], drafted: Sequence[int]
) -> Tensor:
    """Logits over the target's vocabulary behind the root and behind each drafted token,
    (drafted + 1, V): every step computes everything anew, in plain torch."""
    weights = {name: w.to(target.dtype) for name, w in head.network.state_dict().items()}
    options, eps = head.config, head.config.layer.rms_norm_eps
    embed = target.module.get_input_embeddings().weight
    if head.embedding is not None:
        embed = head.embedding.weight.to(target.dtype)

    def norm(x: Tensor, name: str) -> Tensor:
        return weights[f"{name}.weight"] * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()

    hidden_TF = hidden_states(target, tokens[:-1], head.target_layers)
    if options.norm_before_fc:
        hidden_TF = norm(hidden_TF, "input_norm")
    if options.fc_norm:
        parts = hidden_TF.chunk(len(head.target_layers), -1)
        hidden_TF = torch.cat([norm(part, f"fc_norm.{j}") for j, part in enumerate(parts)], -1)
    features = list(hidden_TF @ weights["fc.weight"].T)
    read = [*tokens[1:], *drafted]
    rows = []
    for last in range(len(tokens) - 1, len(read) + 1):
        output_TH = _layers(weights, options, embed[read[:last]], torch.stack(features), norm)
        following = norm(output_TH[-1], "norm")
        row_V = torch.full((head.vocab_size,), -torch.inf, dtype=target.dtype)
        row_V[head.vocabulary.target_ids_D] = weights["lm_head.weight"] @ following
        rows.append(row_V)
        features.append(following if options.norm_output else output_TH[-1])
    return torch.stack(rows)


def _layers(
    weights: dict[str, Tensor], options: Eagle3Config, embedded: Tensor, g: Tensor, norm: Any
) -> Tensor:
    normed = norm(g, "layers.0.hidden_norm")
    residual = normed if options.norm_before_residual else g
    read = torch.cat([norm(embedded, "layers.0.input_layernorm"), normed], -1)
    hidden = residual
    for i in range(options.layer.num_hidden_layers):
        if i:
            residual = hidden
            read = norm(residual, f"layers.{i}.input_layernorm")
        hidden = residual + _attention(weights, options.layer, i, read)
        x = norm(hidden, f"layers.{i}.post_attention_layernorm")
        mlp = f"layers.{i}.mlp."
        gate = torch.nn.functional.silu(x @ weights[f"{mlp}gate_proj.weight"].T)
        up = x @ weights[f"{mlp}up_proj.weight"].T
        hidden = hidden + (gate * up) @ weights[f"{mlp}down_proj.weight"].T
    return hidden


def _attention(weights: dict[str, Tensor], layer: LayerConfig, i: int, read: Tensor) -> Tensor:
    T, C = len(read), layer.head_dim
    angle_TC = torch.arange(T)[:, None] / 10000.0 ** (torch.arange(0, C, 2) / C)
    angle_TC = torch.cat([angle_TC, angle_TC], -1).to(read.dtype)

    def heads(name: str, turn: bool) -> Tensor:
        x = (read @ weights[f"layers.{i}.self_attn.{name}_proj.weight"].T).view(T, -1, C)
        scale_C = weights.get(f"layers.{i}.self_attn.{name}_norm.weight")
        if scale_C is not None:  # Qwen3 norms the queries and keys of each head
            x = scale_C * x * (x.pow(2).mean(-1, keepdim=True) + layer.rms_norm_eps).rsqrt()
        if turn:
            turned = torch.cat([-x[..., C // 2 :], x[..., : C // 2]], -1)
            x = x * angle_TC.cos()[:, None] + turned * angle_TC.sin()[:, None]
        return x.transpose(0, 1)

    q, k, v = heads("q", True), heads("k", True), heads("v", False)
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) / C**0.5
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    joined = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1)
    return joined @ weights[f"layers.{i}.self_attn.o_proj.weight"].T


def started(
    drafter: Any,
    target: HFModel,
    prompts: Sequence[Sequence[int]],
    distribution: Distribution,
    width: int = 512,
) -> tuple[HFModel, Context, Any, Any]:
    """Target, context, target's cache and drafter's state once the prompts are read, ``width``
    tokens a pass."""
    layers = drafter.capabilities.hidden_layers
    target = target.with_hidden_states(layers)
    B = len(prompts)
    context = Context.start(prompts, distribution, [0] * B, range(B))
    state = drafter.start(context)
    rows = [hidden_states(target, prompt, layers) for prompt in prompts]
    hidden_BNH = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=9.0)
    for first in range(0, max(context.lengths) - 1, width):
        last = min(first + width, max(context.lengths) - 1)
        drafter.read_prompt(state, context, hidden_BNH[:, first:last], first)
    return target, context, target.start(context), state


def _block_head(target: HFModel, **options: Any) -> Any:
    from tiny_block_heads import tiny_block_head

    layers = (1, target.num_layers)
    return tiny_block_head(target, target.num_tokens - 5, target_layers=layers, **options)


def tiny_medusa(
    target: HFModel, draft_vocab_size: int, num_heads: int = 3, num_layers: int = 1, seed: int = 7
) -> MedusaHead:
    """Random Medusa heads; the draft vocabulary takes every token but the first ones."""
    width, V, D = target.module.config.hidden_size, target.num_tokens, draft_vocab_size
    network = MedusaNetwork(MedusaConfig(num_heads, num_layers, width, V, D, target.num_layers))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return MedusaHead(network, DraftVocabulary(torch.arange(V - D, V), V), "tiny heads")


RANDOM_HEADS = {
    "medusa": lambda target: tiny_medusa(target, target.num_tokens - 5),
    "eagle3": lambda target: tiny_head(target, target.num_tokens - 5),
    "peagle": lambda target: peagle_head(target, target.num_tokens - 5),
    "dflash": lambda target: _block_head(target),
    "dspark": lambda target: _block_head(
        target,
        sample_from_anchor=True,
        markov_rank=3,
        has_confidence=True,
        confidence_reads_markov=True,
    ),
}
"""By kind, a function that makes a random head for a target."""
