"""Defers two imports that ``transformers`` makes and Outrider has no use for.

``transformers`` imports torchao and SciPy, where they are installed, for functions that save
quantised models and train object detectors. That takes a tenth of the time of importing
``transformers``, and torchao prints four lines of warnings about itself. The modules that make
these imports get functions that import the real ones when they are called. No other module, and no
module that is imported already, is touched.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType

from outrider.imports.finder import Execute, Run

_TORCHAO = "torchao.prototype.safetensors.safetensors_support"
_LOSSES = ("deformable_detr", "for_object_detection", "grounding_dino", "lw_detr", "rf_detr")
_ASSIGN = {"scipy.optimize": ("linear_sum_assignment",)}
_DEFERRED: dict[str, Mapping[str, Sequence[str]]] = {
    "transformers.quantizers.quantizer_torchao": {
        _TORCHAO: ("flatten_tensor_state_dict", "unflatten_tensor_state_dict")
    },
    **dict.fromkeys((f"transformers.loss.loss_{name}" for name in (*_LOSSES, "rt_detr")), _ASSIGN),
}
"""The importing modules; for each, the modules that it imports, and the functions in them."""


def runs() -> dict[str, Run]:
    """What runs the importing modules."""
    return {module: partial(_run, deferred=deferred) for module, deferred in _DEFERRED.items()}


def _run(module: ModuleType, execute: Execute, deferred: Mapping[str, Sequence[str]]) -> None:
    """Runs a module with stand-ins for some modules that it imports."""
    ours = {
        name: _stand_in(name, functions)
        for name, functions in deferred.items()
        if name not in sys.modules
    }
    sys.modules.update(ours)
    try:
        execute(module)
    finally:
        for name, stand_in in ours.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]


def _stand_in(name: str, functions: Sequence[str]) -> ModuleType:
    """A module with these functions; any other name is that of the real module."""
    module = ModuleType(name)

    def get(attribute: str) -> object:
        return _real(name, attribute, module)

    module.__dict__["__getattr__"] = get
    for function in functions:
        module.__dict__[function] = _deferred(name, function)
    return module


def _deferred(name: str, function: str) -> Callable[..., object]:
    """A function that imports the real one when it is called."""

    def call(*arguments: object, **options: object) -> object:
        real: Callable[..., object] = getattr(import_module(name), function)
        return real(*arguments, **options)

    return call


def _real(name: str, attribute: str, stand_in: ModuleType) -> object:
    """An attribute of the real module, which is imported in the stand-in's place. Names of Python's
    own, which the import system asks for, are no reason to import it."""
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    if sys.modules.get(name) is stand_in:
        del sys.modules[name]
    value: object = getattr(import_module(name), attribute)
    return value
