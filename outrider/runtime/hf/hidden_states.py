"""Hidden states of chosen layers, recorded on the way through an unmodified model.

Recording needs a view of the module (``views.py``) in which :class:`OutputTap` stands around the
layers asked for. The loaded module has no hooks, and a forward pass that is asked for no hidden
states runs no code of this file. Which recording a forward pass belongs to is known to the thread
that runs it, so threads may share a view.

Legend: B rows, N query tokens, H hidden width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outrider.core.errors import UnsupportedModelError
from outrider.runtime.hf.views import with_parts

M = TypeVar("M", bound=nn.Module)

Recording = dict[int, Tensor]
"""Hidden states (B, N, H) by layer, numbered as in ``ForwardBatch.hidden_layers``."""

_RECORDING: ContextVar[Recording] = ContextVar("hidden states of this thread's forward pass")


class OutputTap(nn.Module):
    """A part of a model whose output is recorded. Its other attributes are those of the part.

    Args:
        part: a layer, or all layers with the final norm.
        layer: the number that its output is recorded under.
    """

    def __init__(self, part: nn.Module, layer: int) -> None:
        super().__init__()
        self.part = part
        self.layer = layer

    def extra_repr(self) -> str:
        return f"layer={self.layer}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.part(*args, **kwargs)
        _RECORDING.get()[self.layer] = output if isinstance(output, Tensor) else output[0]
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)


@contextmanager
def recording_hidden_states() -> Iterator[Recording]:
    """Collects what the taps record in the forward passes of the body."""
    recording: Recording = {}
    before = _RECORDING.set(recording)
    try:
        yield recording
    finally:
        _RECORDING.reset(before)


def tapped(module: M, stack: nn.Module, num_layers: int, layers: Sequence[int], name: str) -> M:
    """A view of a module that records the outputs of some layers.

    Args:
        module: what is viewed; not changed.
        stack: the part of it with all decoder layers and the final norm.
        num_layers: decoder layers of the stack.
        layers: the layers, numbered as in ``ForwardBatch.hidden_layers``.
        name: how messages call the model.

    Raises:
        UnsupportedModelError: the stack is no part of the module, or has no list of its layers.
    """
    inner = [layer for layer in layers if layer < num_layers]
    if inner:
        every = decoder_layers(stack, num_layers, name)
        taps = {every[layer - 1]: OutputTap(every[layer - 1], layer) for layer in inner}
        module, whole = with_parts(module, taps), module
        stack = _counterpart(whole, module, stack)
    if num_layers in layers:
        if stack is module:
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) does not keep its layers apart from its head, "
                f"so the hidden states after its last layer cannot be recorded"
            )
        module = with_parts(module, {stack: OutputTap(stack, num_layers)})
    return module


def decoder_layers(stack: nn.Module, num_layers: int, name: str) -> Sequence[nn.Module]:
    """The decoder layers of a model, first one first.

    Raises:
        UnsupportedModelError: the model keeps them in no list.
    """
    for module in stack.modules():  # the outermost list comes first
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise UnsupportedModelError(
        f"{name} ({type(stack).__name__}) keeps its layers in no list of {num_layers}, so their "
        f"hidden states are out of reach"
    )


def joined(recording: Recording, layers: Sequence[int]) -> Tensor | None:
    """The hidden states of these layers side by side, (B, N, H); None for no layers."""
    if not layers:
        return None
    if len(layers) == 1:
        return recording[layers[0]]
    return torch.cat([recording[layer] for layer in layers], -1)


def _counterpart(whole: nn.Module, view: nn.Module, part: nn.Module) -> nn.Module:
    """The part of a view that stands where ``part`` stands in the whole."""
    (path,) = (path for path, each in whole.named_modules() if each is part)
    return view.get_submodule(path)
