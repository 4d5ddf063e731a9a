"""Views of recurrent models whose layers hand their recurrences to the cache.

A layer of ``transformers`` computes the inputs of its recurrence, calls a function for the
recurrence, and goes on from its output. In a view (``views.py``) that function is ours: it has the
cache of the forward pass run the recurrence (``recurrences.py``), from the state that the cache
holds. Projections, convolutions, gates and norms are the model's own, and so is the function for
several tokens where it is right. Most layers call a function of their Python module; the view runs
a copy of the layer's ``forward`` in which that one name stands for ours. The loaded module and its
Python module are not changed.

A context variable holds the cache of a forward pass, so threads may share a view.

Legend: B rows, N query tokens, C channels, H heads, S state size, P width of a head.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.errors import UnsupportedModelError
from outrider.runtime.hf.recurrences import (
    ChunkScan,
    DeltaRule,
    GatedLinearUnit,
    MatrixLSTM,
    SelectiveScan,
    WeightedAverage,
)
from outrider.runtime.hf.views import StandIn, copied, with_parts
from outrider.runtime.kv_cache.recurrence import Window
from outrider.runtime.kv_cache.recurrent import RecurrentCache

Function = Callable[..., Any]

_CACHE: ContextVar[RecurrentCache] = ContextVar("cache of this thread's forward pass")

M = TypeVar("M", bound=nn.Module)


@contextmanager
def running(cache: RecurrentCache) -> Iterator[None]:
    """Runs the forward passes of the body with this cache."""
    before = _CACHE.set(cache)
    try:
        yield
    finally:
        _CACHE.reset(before)


def with_recurrences(module: M, name: str) -> M:
    """A view of a model whose recurrences run in the cache.

    Args:
        module: the model, in evaluation mode.
        name: how messages call it.

    Raises:
        UnsupportedModelError: a layer whose ``forward`` was set on the instance.
    """
    config: Any = module.config
    special = _SPECIAL.get(config.get_text_config().model_type)
    parts = _layers(module, name) if special is None else special(module, name)
    return with_parts(module, parts) if parts else module


def _layers(module: nn.Module, name: str) -> dict[nn.Module, nn.Module]:
    """Views of the layers that call one of the functions that we replace."""
    found: dict[nn.Module, nn.Module] = {}
    for each in module.modules():
        forward: Any = inspect.unwrap(type(each).forward)
        calls = [
            call for call in _FUNCTIONS if call in getattr(forward, "__code__", _NONE).co_names
        ]
        if calls:
            layer: Any = each
            found[each] = _calling(each, forward, calls, layer.layer_idx, name)
    return found


def _calling(
    part: nn.Module, forward: FunctionType, calls: list[str], layer: int, name: str
) -> nn.Module:
    """A view of a layer that calls our functions in the place of its Python module's."""
    if "forward" in vars(part):
        raise UnsupportedModelError(
            f"{name} has a layer ({type(part).__name__}) whose forward function was set on the "
            f"instance, so its recurrence is out of reach: restore the class's forward"
        )
    ours = {call: _FUNCTIONS[call](forward.__globals__[call], layer) for call in calls}
    twin: Any = copied(part)
    twin.forward = MethodType(
        FunctionType(
            forward.__code__,
            forward.__globals__ | ours,
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        ),
        twin,
    )
    return twin


def _selective_scan(original: Function, layer: int) -> Function:
    """Mamba. Arguments as those of ``mamba_selective_scan``, which knows no state to begin with."""

    def scan(
        x_BCN: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **unused: object,
    ) -> Any:
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[..., None]
        step_BCN = F.softplus(dt) if delta_softplus else dt
        cache = _CACHE.get()
        y_BCN = cache.run(layer, "scan", SelectiveScan(A), x_BCN, step_BCN, B, C)
        if D is not None:
            y_BCN = y_BCN + x_BCN * D[None, :, None]
        if z is not None:
            y_BCN = y_BCN * F.silu(z)
        return y_BCN, cache.state(layer, "scan")

    return scan


def _chunk_scan(original: Function, layer: int) -> Function:
    """Mamba-2. Arguments as those of ``mamba2_chunk_scan``."""

    def scan(
        x_BNHP: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **unused: object,
    ) -> Any:
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        step_BNH = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        cache = _CACHE.get()
        recurrence = ChunkScan(original, chunk_size, A, D)
        y_BNHP = cache.run(layer, "scan", recurrence, x_BNHP, step_BNH, B, C)
        return y_BNHP, cache.state(layer, "scan")

    return scan


def _delta_rule(original: Function, layer: int) -> Function:
    """The gated delta rule. Arguments as those of ``torch_chunk_gated_delta_rule``."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: None = None,
        output_final_state: bool = False,
        **settings: Any,
    ) -> Any:
        cache = _CACHE.get()
        recurrence = DeltaRule(original, settings)
        output = cache.run(layer, "rule", recurrence, query, key, value, g, beta)
        return output, cache.state(layer, "rule")

    return rule


def _weighted_average(original: Function, layer: int) -> Function:
    """RWKV-4. Arguments as those of ``rwkv_linear_attention``."""

    def average(
        time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, **unused: object
    ) -> Any:
        recurrence = WeightedAverage(time_decay, time_first)
        return _CACHE.get().run(layer, "average", recurrence, key, value), None

    return average


_FUNCTIONS: dict[str, Callable[[Function, int], Function]] = {
    "mamba_selective_scan": _selective_scan,
    "mamba2_chunk_scan": _chunk_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "rwkv_linear_attention": _weighted_average,
}
"""What a layer's function for several tokens is replaced by, by the name that it has in the
layer's Python module. Our function is made of that function and the layer's number."""


def _rwkv(module: Any, name: str) -> dict[nn.Module, nn.Module]:
    """RWKV-4, which is told of no state. Each block shifts its inputs by a token, twice.

    The model halves weights of later layers before its first forward pass, in place. That is done
    here, since the view would do so once more.
    """
    module.rwkv._rescale_layers()
    parts: dict[nn.Module, nn.Module] = {}
    for layer, block in enumerate(module.rwkv.blocks):
        forward: Any = inspect.unwrap(type(block.attention).forward)
        average = _calling(block.attention, forward, ["rwkv_linear_attention"], layer, name)
        for part, twin in (
            (block.attention, average),
            (block.feed_forward, copied(block.feed_forward)),
        ):
            kind = "attention" if part is block.attention else "feed-forward"
            shift = StandIn(part.time_shift, _shift(layer, f"shift of {kind}"))
            twin._modules = dict(part._modules) | {"time_shift": shift}
            parts[part] = twin
    return parts


def _shift(layer: int, kind: str) -> Callable[[Tensor], Tensor]:
    """The inputs of the tokens before, (B, N, C)."""

    def shift(hidden_BNC: Tensor) -> Tensor:
        x_BCN = hidden_BNC.transpose(1, 2)
        all_BCT = _CACHE.get().run(layer, kind, Window(1), x_BCN)
        return all_BCT[..., :-1].transpose(1, 2)

    return shift


def _recurrent_gemma(module: Any, name: str) -> dict[nn.Module, nn.Module]:
    """RecurrentGemma, whose layers keep a state in the module, for one token at a time."""
    parts: dict[nn.Module, nn.Module] = {}
    for layer, each in enumerate(module.model.layers):
        block = each.temporal_block
        if hasattr(block, "rg_lru"):
            unit = copied(block.rg_lru)
            unit._rnn_scan = _linear_unit(layer)
            parts[block.rg_lru] = unit
            parts[block.conv_1d] = StandIn(block.conv_1d, _convolution(block.conv_1d, layer))
    return parts


def _linear_unit(layer: int) -> Function:
    """Arguments as those of ``RecurrentGemmaRglru._rnn_scan``."""

    def scan(
        hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **unused: object
    ) -> tuple[Tensor, None]:
        decay_BNC = recurrent_gate * ~reset
        cache = _CACHE.get()
        return cache.run(layer, "unit", GatedLinearUnit(), hidden_states, decay_BNC), None

    return scan


def _convolution(module: Any, layer: int) -> Callable[[Tensor], Tensor]:
    """A causal convolution per channel that continues from the tokens before, (B, C, N)."""

    def convolve(x_BCN: Tensor) -> Tensor:
        window = Window(module.kernel_size[0] - 1)
        all_BCT = _CACHE.get().run(layer, "convolution", window, x_BCN)
        return F.conv1d(all_BCT, module.weight, module.bias, groups=module.groups)

    return convolve


def _xlstm(module: Any, name: str) -> dict[nn.Module, nn.Module]:
    """xLSTM. Its stack reads any number of tokens in one forward pass, never in parts."""
    parts: dict[nn.Module, nn.Module] = {}
    for layer, block in enumerate(module.backbone.blocks):
        backend = block.mlstm_layer.mlstm_backend
        parts[backend] = StandIn(backend, _matrix_lstm(backend, layer))
    whole = with_parts(module.backbone, parts)
    whole.config = copy.copy(whole.config)
    whole.config.max_inference_chunksize = 2**62
    return {module.backbone: whole}


def _matrix_lstm(backend: Function, layer: int) -> Function:
    """Arguments as those of ``xLSTMBackend``."""

    def lstm(
        query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, **unused: object
    ) -> Any:
        recurrence = MatrixLSTM(backend)
        output = _CACHE.get().run(layer, "lstm", recurrence, query, key, value, igate, fgate)
        return output, (_IGNORED, _IGNORED, _IGNORED)

    return lstm


class XLSTMStates:
    """What xLSTM is given as a cache: it copies states into it, which the cache has stored.

    Args:
        num_layers: layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        self.rnn_state = [(_IGNORED, _IGNORED, _IGNORED)] * num_layers
        self.rnn_state_initial = False
        self.seqlen_offset = 0


class _Ignored:
    def copy_(self, other: object) -> None:
        """Nothing to copy."""


_IGNORED = _Ignored()
_NONE = (lambda: None).__code__
_SPECIAL: dict[str, Callable[[Any, str], dict[nn.Module, nn.Module]]] = {
    "recurrent_gemma": _recurrent_gemma,
    "rwkv": _rwkv,
    "xlstm": _xlstm,
}
