"""Attention layers on a GPU: two matrix products with a few kernels between them.

Of a decoder layer of ``transformers``, attention launches most kernels: three products for queries,
keys and values, two norms in some families, ten kernels of rotary embedding, and copies of all keys
and values for each head of queries that shares them. Here they are one product, one kernel that
norms and rotates and writes keys and values to their slots, and one that reads them where they are
(``gpu_kernels.py``, ``gpu_attention.py``).

Legend: B rows, N query tokens, H heads, Q of queries, K of keys, C width of a head, S slots.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.runtime.kernels.fused_norms import added_to_weight, epsilon_of
from outrider.runtime.kernels.joined_linears import can_join, example_inputs, join, joined_linear
from outrider.runtime.kernels.layers import is_plain_attention
from outrider.runtime.kernels.replaced_methods import (
    agree,
    example,
    replace_forward,
    runs_own_code,
)

_NAME = "outrider_gpu"
_SPY = "outrider_spy"
_TRIED = (24, 200)
"""Slots of the examples that the attention kernel is tried on: one block reads the row, or several
do."""

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def use_fused_attention(module: nn.Module) -> int:
    """Lets a module, where it has ``sdpa``, attend by our kernel, and its attention layers run by
    fewer kernels where they compute what ours do; returns how many layers do.

    Args:
        module: a model; the methods of its layers are replaced, and their weights moved together.
    """
    config: Any = getattr(module, "config", None)
    if config is None or config._attn_implementation not in ("sdpa", _NAME):
        return 0
    if not _kernel_computes_attention(config.get_text_config(), next(module.parameters())):
        return 0
    module.set_attn_implementation(_NAME)  # type: ignore[operator]
    found = 0
    for each in module.modules():
        variant = _variant(each)
        if variant is not None:
            join(_projections(each))
            replace_forward(each, forward, **variant)
            found += 1
    return found


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if not runs_own_code(module) and is_plain_attention(attention_mask, kwargs):
        from outrider.runtime.kernels.gpu_attention import attended, attends

        assert attention_mask is not None
        given = query, key, value, attention_mask
        if attends(*given):
            scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
            return attended(*given, scale), None
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, **kwargs
    )
    return result


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, eager_mask)  # else it gets no mask


def forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    *,
    more: Mapping[str, Any],
    added: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The layer's method; ``more`` is what its attention function is told besides, and ``added``
    what is added to the weights of its norms, if it has any."""
    given = {
        "hidden_states": hidden_states,
        "position_embeddings": position_embeddings,
        "attention_mask": attention_mask,
        "past_key_values": past_key_values,
    }
    if runs_own_code(module) or not is_usual(module, position_embeddings):
        found: tuple[Tensor, None] = type(module).forward(module, **given, **kwargs)
        return found
    return module.o_proj(_attended(module, **given, added=added, **more, **kwargs)), None


def is_usual(
    module: Any, position_embeddings: tuple[Tensor, Tensor] | None = None, **_: Any
) -> bool:
    """Whether a call is of the form that was tested: a head is rotated in full, and the attention
    function is one that is looked up by its name, as eager attention is not."""
    if position_embeddings is None or position_embeddings[0].shape[-1] != module.head_dim:
        return False
    return module.config._attn_implementation in ALL_ATTENTION_FUNCTIONS


def _attended(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any,
    added: float,
    **kwargs: Any,
) -> Tensor:
    """What the last matrix of the layer is multiplied by, (B, N, QC)."""
    cos_BNC, sin_BNC = position_embeddings
    given = hidden_states, cos_BNC, sin_BNC, past_key_values
    q_BQNC, k_BKSC, v_BKSC = _written(module, *given, added)
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    found_BNQC, _ = attend(
        module,
        q_BQNC,
        k_BKSC,
        v_BKSC,
        attention_mask,
        dropout=0.0,
        scaling=module.scaling,
        **kwargs,
    )
    found_BNC: Tensor = found_BNQC.reshape(*hidden_states.shape[:-1], -1)
    return found_BNC


def _written(
    module: Any, x_BNH: Tensor, cos: Tensor, sin: Tensor, cache: Any, added: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, Q, N, C), and the keys and values that they attend to, (B, K, S, C) each: those
    of the query tokens are written to the cache first."""
    from outrider.runtime.kernels.gpu_kernels import HeadNorms, Place, rotated

    B, N, _ = x_BNH.shape
    C = module.head_dim
    Q, K = module.q_proj.out_features // C, module.k_proj.out_features // C
    qkv_BNHC = joined_linear(x_BNH, _projections(module)).view(B, N, Q + 2 * K, C)
    norms, epsilon = None, epsilon_of(getattr(module, "q_norm", None))
    if epsilon is not None:
        norms = HeadNorms(module.q_norm.weight, module.k_norm.weight, epsilon, added)
    if hasattr(cache, "place"):
        place = Place(*cache.place(module.layer_idx))
        q_BNQC = rotated(qkv_BNHC, Q, cos, sin, place, norms)
        return q_BNQC.transpose(1, 2), *cache.read(module.layer_idx)
    k_BKNC, v_BKNC = qkv_BNHC.new_empty(2, B, K, N, C)
    place = Place(k_BKNC, v_BKNC, torch.arange(N, device=x_BNH.device).expand(B, N))
    q_BNQC = rotated(qkv_BNHC, Q, cos, sin, place, norms)
    if cache is None:
        return q_BNQC.transpose(1, 2), k_BKNC, v_BKNC
    return q_BNQC.transpose(1, 2), *cache.update(k_BKNC, v_BKNC, module.layer_idx)


def _projections(module: Any) -> tuple[Any, Any, Any]:
    return module.q_proj, module.k_proj, module.v_proj


# -------------------------------------------------------------- whether ours compute the same


def _variant(module: Any) -> dict[str, Any] | None:
    """The keywords of :func:`forward` for an attention layer of the usual form, whose own method
    computes the same; None for other modules."""
    added = _added(module) if _has_parts(module) else None
    more = None if added is None else _arguments_if_same(module, added)
    return None if more is None else {"more": more, "added": added}


def _has_parts(module: Any) -> bool:
    if not can_join([getattr(module, name, None) for name in _PROJECTIONS]):
        return False
    head_dim = getattr(module, "head_dim", None)
    names = ("o_proj", "scaling", "layer_idx", "config")
    usual = isinstance(head_dim, int) and not head_dim % 2
    return usual and all(hasattr(module, name) for name in names)


def _added(module: Any) -> float | None:
    """What is added to the weights of a layer's norms of queries and keys, 0 if it has none; None
    where they are none of heads, or not alike."""
    from outrider.runtime.kernels.gpu_kernels import ADDED, normed

    norms: list[Any] = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if norms == [None, None]:
        return 0.0
    alike = {(epsilon_of(each), added_to_weight(each, normed, ADDED)) for each in norms}
    if None in norms or len(alike) > 1:
        return None
    of_heads = all(each.weight.shape == (module.head_dim,) for each in norms)
    return alike.pop()[1] if of_heads else None


@torch.no_grad()
def _arguments_if_same(module: Any, added: float) -> Mapping[str, Any] | None:
    """What the layer tells its attention function besides what all layers do, if its own method and
    ours agree on examples: on the keys and values for the cache, on all that the attention function
    is given, and on the results. None if they do not."""
    twin = copy.copy(module)  # whose attention function is the spy's
    twin.config = copy.copy(module.config)
    twin.config._attn_implementation = _SPY
    try:
        theirs, their_result = _spied(twin, type(module).forward)
        more = {name: value for name, value in theirs.kwargs.items() if name == "sliding_window"}
        ours, our_result = _spied(twin, partial(forward, more=more, added=added))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None  # it is of another form
    same = theirs.kwargs == ours.kwargs and len(theirs.numbers) == len(ours.numbers)
    same = same and all(map(agree, ours.numbers, theirs.numbers))
    return more if same and agree(our_result, their_result) else None


def example_angles(module: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of angles for two rows of two tokens, as a model computes them."""
    angle_BNC = example(like.new_empty(module.head_dim // 2)).view(2, 2, -1).repeat(1, 1, 2)
    return angle_BNC.cos(), angle_BNC.sin()


def _spied(module: Any, method: Callable[..., tuple[Tensor, Any]]) -> tuple["_Calls", Tensor]:
    """What a layer gives to its cache and attention function for an example, and its result."""
    x_BNH = example_inputs(module.q_proj).view(2, 2, -1)
    calls = _Calls()
    ALL_ATTENTION_FUNCTIONS[_SPY] = calls.attend
    try:
        result, _ = method(
            module,
            hidden_states=x_BNH,
            position_embeddings=example_angles(module, x_BNH),
            attention_mask=None,
            past_key_values=calls,
        )
    finally:
        del ALL_ATTENTION_FUNCTIONS[_SPY]
    return calls, result


@torch.no_grad()
def _kernel_computes_attention(config: Any, like: Tensor) -> bool:
    """Whether our kernel and torch's agree on examples of a model's heads, of the device and dtype
    of a tensor: of one query token, and of as many as it takes."""
    from outrider.runtime.kernels.gpu_attention import attended, most_queries

    heads = config.num_attention_heads
    shared = heads // (getattr(config, "num_key_value_heads", None) or heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    most = most_queries(width, like.dtype) // shared
    for num_tokens, num_slots in product({1, max(1, most)}, _TRIED):
        q_BQNC = example(like.new_empty(shared * num_tokens * width)).view(
            4, shared, num_tokens, -1
        )
        k_B1SC = example(like.new_empty(num_slots * width)).view(4, 1, num_slots, -1)
        v_B1SC = k_B1SC.flip(2)
        mask_B1NS = like.new_zeros(4, 1, num_tokens, num_slots)
        mask_B1NS[..., 1::3] = torch.finfo(like.dtype).min
        found_BNQC = attended(q_BQNC, k_B1SC, v_B1SC, mask_B1NS, width**-0.5)
        repeated = k_B1SC.repeat(1, shared, 1, 1), v_B1SC.repeat(1, shared, 1, 1)
        wanted_BQNC = functional.scaled_dot_product_attention(q_BQNC, *repeated, mask_B1NS)
        if not agree(found_BNQC, wanted_BQNC.transpose(1, 2)):
            return False
    return True


class _Calls:
    """What an attention layer gives to its cache and to its attention function.

    Attributes:
        numbers: tensors.
        kwargs: all else.
    """

    def __init__(self) -> None:
        self.numbers: list[Tensor] = []
        self.kwargs: dict[str, Any] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """As of a cache."""
        self.numbers += [key, value]
        self.kwargs["layer"] = layer
        return key, value

    def attend(
        self, _: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """As an attention function."""
        self.numbers += [query, key, value]
        self.kwargs |= kwargs
        return (query + query.flip(2)).transpose(1, 2), None
