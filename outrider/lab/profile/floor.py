"""The least time that a forward pass can take: the bytes it must read ÷ the memory bandwidth.

The bytes are those of the weights as stored, quantised or not, each shared weight once, and of the
keys and values of the context. Left out are

    embedding table       except the rows of the pass's tokens; a table tied to the head counts
    encoder               runs once per source, not in a decoder's pass
    cross-attention K, V  the projections that make them also run once per source
    skipped layers        of a model that computes only some of them, such as an early exit
    unused experts        of E experts with k per token, N tokens read E (1 - (1 - k/E)^N) if the
                          router is balanced: an expectation, not a bound
    activations           stay in cache

Legend: E experts, N query tokens of a pass.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outrider.runtime import HFModel, KVCache

_CROSS = re.compile(r"(EncDecAttention\.[kv]|encoder_attn\.[kv]_proj)$")  # T5; BART and Marian
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Floor:
    """The bytes that a forward pass must read, and the bandwidth.

    Attributes:
        weights: bytes of the weights.
        keys_values: bytes of keys and values.
        bandwidth: bytes per second.
        cached: whether all of it fits into the last-level cache; the bandwidth is then the
            cache's, since the memory's is no bound.
    """

    weights: int
    keys_values: int
    bandwidth: float
    cached: bool

    @property
    def seconds(self) -> float:
        """The least time of the pass."""
        return (self.weights + self.keys_values) / self.bandwidth

    def as_dict(self) -> dict[str, Any]:
        """The floor as a JSON document."""
        return {**vars(self), "seconds": self.seconds}


def weight_bytes(module: nn.Module, num_tokens: int = 1, left_out: Iterable[nn.Module] = ()) -> int:
    """Bytes of the weights that a forward pass reads.

    Args:
        module: a ``transformers`` model.
        num_tokens: N, query tokens of the pass.
        left_out: modules that the pass does not run.
    """
    skipped = {part for root in (*left_out, *_source_only(module)) for part in root.modules()}
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    tensors: dict[int, Tensor] = {}
    for name, holder in module.named_modules():
        if holder in skipped:
            continue
        for tensor in _own_tensors(holder):
            tensors[id(tensor)] = tensor
            holders.setdefault(id(tensor), []).append((name, holder))
    experts = expert_share(module, num_tokens)
    total = 0.0
    for key, tensor in tensors.items():
        num_bytes = stored_bytes(tensor)
        if all(isinstance(holder, nn.Embedding) for _, holder in holders[key]):
            total += num_bytes * min(1.0, num_tokens / tensor.shape[0])
        elif any(EXPERTS.search(name) for name, _ in holders[key]):
            total += num_bytes * experts
        else:
            total += num_bytes
    return round(total)


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor as stored; of a wrapper, such as a quantised weight, those of its parts."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(stored_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def cache_bytes(model: HFModel, cache: KVCache, length: float) -> int:
    """Bytes of the keys and values that a forward pass reads for one row.

    Args:
        model: the model that the cache belongs to.
        cache: its KV cache.
        length: tokens of the row; a layer with a sliding window reads at most its window. The keys
            and values of an encoder-decoder's source count in full.
    """
    cross = getattr(cache, "cross", None)
    source = 0 if cross is None else cross.num_bytes()
    buffers = [buffer for buffer in cache.keys if buffer is not None]
    if not buffers:
        return source
    slots = sum(buffer.shape[0] * buffer.shape[2] for buffer in buffers)
    per_slot = (cache.num_bytes() - source) / slots
    needed = sum(min(length, window) for window in attention_windows(model, len(buffers)))
    return round(per_slot * needed) + source


def decoder_layers(model: HFModel) -> list[nn.Module]:
    """The layers of a decoder-only model: its outermost module list of the right length."""
    num_layers = model.module.config.get_text_config().num_hidden_layers
    for part in model.module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == num_layers:
            return list(part)
    return []


def _own_tensors(holder: nn.Module) -> Iterator[Tensor]:
    yield from holder.parameters(recurse=False)
    yield from holder.buffers(recurse=False)


def _source_only(module: nn.Module) -> list[nn.Module]:
    """The modules of an encoder-decoder that run only once per source."""
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return []
    once = [part for name, part in module.named_modules() if _CROSS.search(name)]
    encoder: Any = module.get_encoder()  # type: ignore[operator]
    decoder: Any = module.get_decoder()  # type: ignore[operator]
    shared = set(decoder.modules())
    leaves = (part for part in encoder.modules() if not list(part.children()))
    return [*once, *(part for part in leaves if part not in shared)]


def expert_share(module: nn.Module, num_tokens: int) -> float:
    """The expected share of the experts' weights that a pass reads, with a balanced router."""
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    E = next((n for name in _NUM_EXPERTS if (n := getattr(config, name, None))), None)
    k = getattr(config, "num_experts_per_tok", None)
    if not E or not k:
        return 1.0
    return float(1 - (1 - k / E) ** num_tokens)


def attention_windows(model: HFModel, num_layers: int) -> list[float]:
    """The attention window of each layer in tokens; infinite for full attention."""
    config: Any = model.module.config.get_text_config()
    window = getattr(config, "sliding_window", None) or float("inf")
    types = getattr(config, "layer_types", None)
    if not types:
        return [window] * num_layers
    return [window if kind == "sliding_attention" else float("inf") for kind in types[:num_layers]]
