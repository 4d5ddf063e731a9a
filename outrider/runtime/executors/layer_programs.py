"""Forward passes whose decoder layers are compiled programs, while there is no program of the whole
forward pass yet.

The decoder layers of a model repeat. So one program, traced from one layer, runs each of them over
its own weights, and is compiled in a fraction of the time that a program of all layers takes. What
is around the layers runs eagerly.

Legend: B rows, N query tokens, S slots that are read.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from outrider.core.errors import UnsupportedModelError
from outrider.runtime.executors.compile_cache import Program
from outrider.runtime.executors.export import export
from outrider.runtime.executors.layer_calls import (
    CACHE,
    SIZES,
    TENSOR,
    LayerCall,
    at,
    layer_calls,
    tensors_of,
)
from outrider.runtime.executors.traced import QUERIES, SPAN, ChainForward, TreeForward
from outrider.runtime.executors.traced_cache import (
    ROWS,
    SLOTS,
    KVBuffers,
    TracedKVCache,
    empty_buffers,
    halves,
)
from outrider.runtime.hf.hidden_states import decoder_layers
from outrider.runtime.hf.views import StandIn, with_parts
from outrider.runtime.kernels.exact import exact_mode

_MOST_KINDS = 4
"""Different layers of a model that have a program each; with more, a program of the whole forward
pass is there as soon."""

_AS_IT_IS = nullcontext()
_NUMBERS = ("layer_idx", "layer_id", "layer_index", "block_idx")
"""Attributes that tell a layer its number."""


class LayerForward(nn.Module):
    """A decoder layer over its KV buffers.

    Args:
        layer: the layer.
        call: how the model calls it.
        config: the model's configuration.
    """

    kind: ClassVar[str] = "layer"
    optimisation: ClassVar[str] = "O0"
    """Level at which the C++ compiler optimises the calls of the program's loops: it is to be there
    soon, and its loops take the time."""

    def __init__(self, layer: nn.Module, call: LayerCall, config: Any) -> None:
        super().__init__()
        self.module = layer
        self.call = call
        self.config = config

    def extra_repr(self) -> str:
        """All that the program depends on besides classes, configuration and tensors."""
        arguments, results, _, sizes = self.call
        return f"{arguments}, {results}, {sizes}, {self._settings()}"

    def forward(
        self,
        tensors: list[Tensor],
        slots_BN: Tensor,
        slot_S: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> list[Tensor]:
        """The tensors that the layer returns.

        Args:
            tensors: those among its arguments.
            slots_BN: the slots of the query tokens.
            slot_S: as many numbers as slots are read.
            keys: the KV buffer of its keys, alone.
            values: that of its values.
        """
        cache = _LayerKVCache(keys, values, slots_BN, slot_S.shape[0])
        args, kwargs = self.call.arguments.filled(tensors, cache)
        return tensors_of(self.module(*args, **kwargs))

    def trace(self, key: Tensor, value: Tensor) -> ExportedProgram:
        """The program of it, over KV buffers like these."""
        rows, queries, span, slots = SIZES
        slots_BN = torch.arange(span - queries, span).repeat(rows, 1)
        buffers = empty_buffers(([key], [value]), rows, slots, reads_sources=False)
        inputs = self.call.tensors, slots_BN, torch.arange(span), *buffers
        buffer = [{0: ROWS, 2: SLOTS}]
        sizes = self.call.sizes, {0: ROWS, 1: QUERIES}, {0: SPAN}, buffer, buffer
        return export(self, inputs, sizes)

    def _settings(self) -> list[tuple[str, Any]]:
        """Numbers, flags and words among the attributes of the layer and its parts, which may
        differ from layer to layer."""
        return [
            (f"{path}.{name}", value)
            for path, part in self.module.named_modules()
            for name, value in sorted(vars(part).items())
            if isinstance(value, bool | int | float | str) and name not in _NUMBERS
        ]


class _LayerKVCache(TracedKVCache):
    """The KV buffers of one layer, whatever its number."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return super().update(key_states, value_states, 0)


class CompiledLayers:
    """The decoder layers of a model, each of which is run by a program.

    Args:
        each: a forward pass of the model over a tree.
        buffers: keys and values like those that it runs over.
        make: compiles a layer; called with the layer and the KV buffers of its keys and values.

    Raises:
        UnsupportedModelError: the layers have no programs of this kind.
        Exception: what ``make`` raises.
    """

    def __init__(
        self,
        each: TreeForward,
        buffers: KVBuffers,
        make: Callable[[LayerForward, Tensor, Tensor], Program],
    ) -> None:
        module: Any = each.module
        config = module.config.get_text_config()
        name = type(module).__name__
        layers = decoder_layers(module.get_decoder(), config.num_hidden_layers, name)
        calls = layer_calls(each, layers, buffers)
        forwards = [
            LayerForward(layer, call, module.config)
            for layer, call in zip(layers, calls, strict=True)
        ]
        if len(set(map(repr, forwards))) > _MOST_KINDS:
            raise UnsupportedModelError(f"{name} has more than {_MOST_KINDS} kinds of layers")
        programs = map(make, forwards, *buffers)
        self._stand_ins = {
            one.module: StandIn(one.module, _CompiledLayer(program, one.call, number))
            for number, (one, program) in enumerate(zip(forwards, programs, strict=True))
        }

    def program(self, each: TreeForward, *, exact: bool) -> Program:
        """A forward pass of the model by these programs, called as a program of all of it.

        Args:
            each: the forward pass.
            exact: whether what is around the layers computes with exact arithmetic.
        """
        view = with_parts(each.module, self._stand_ins)
        twin = type(each)(view, each.spec, each.hidden_layers)

        def run(inputs: list[Tensor]) -> list[Tensor]:
            with exact_mode() if exact else _AS_IT_IS:
                return list(twin(*_nested(twin, inputs)))

        return run


class _CompiledLayer:
    """A layer's forward method, by its program.

    Args:
        program: the program.
        call: how the model calls the layer.
        number: of the layer, the first one's being 0.
    """

    def __init__(self, program: Program, call: LayerCall, number: int) -> None:
        self._program, self._results, self._number = program, call.results, number
        self._tensors = call.arguments.paths_to(TENSOR)
        (self._cache,) = call.arguments.paths_to(CACHE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = args, kwargs
        cache: TracedKVCache = at(arguments, self._cache)
        inputs = [at(arguments, path).contiguous() for path in self._tensors]
        inputs += cache.slots_BN, cache.slot_S
        inputs += cache.keys[self._number], cache.values[self._number]
        return self._results.filled(self._program(inputs))


def _nested(each: TreeForward, inputs: Sequence[Tensor]) -> list[Any]:
    """The inputs of a program as the forward pass takes them."""
    moving: list[Any] = list(inputs[: each.num_moving])
    if not isinstance(each, ChainForward):
        moving[3:] = [moving[3:]]  # what attention depends on is one argument
    return [*moving, *map(list, halves(inputs[each.num_moving :]))]
