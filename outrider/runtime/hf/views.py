"""Views of a module: the same weights, with some parts replaced, and the module untouched.

A model may be in use elsewhere, in other threads too, so it must not be changed, not even for one
forward pass. Code that needs it to compute something else makes a view. The containers around the
replaced parts are copied without their contents; every other part, and every parameter, is the
module's own.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

from torch import nn

from outrider.core.errors import UnsupportedModelError

M = TypeVar("M", bound=nn.Module)


class StandIn(nn.Module):
    """Replaces a module in a view, with a forward method of its own. Its other attributes are those
    of the module, whose weights are not part of the view.

    Args:
        module: what it replaces.
        forward: what it computes.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        vars(self)["_replaced"] = module
        vars(self)["forward"] = forward
        self.training = module.training

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_replaced"], name)


def with_parts(module: M, parts: Mapping[nn.Module, nn.Module]) -> M:
    """A view of a module in which some parts are replaced.

    Args:
        module: what is viewed; not changed.
        parts: the replacements, by the part that each replaces.

    Raises:
        UnsupportedModelError: a container on the way to a part runs a function that was set on the
            instance and is bound to the original.
    """
    viewed: dict[nn.Module, nn.Module] = dict(parts)

    def view_of(part: nn.Module) -> nn.Module:
        if part not in viewed:
            children = {name: child and view_of(child) for name, child in part._modules.items()}
            same = all(child is part._modules[name] for name, child in children.items())
            viewed[part] = part if same else copied(part, children)
        return viewed[part]

    return cast(M, view_of(module))


def copied(module: M, children: Mapping[str, nn.Module | None] | None = None) -> M:
    """A module with the same parameters, hooks and attributes, and these children.

    Raises:
        UnsupportedModelError: as :func:`with_parts`.
    """
    twin = type(module).__new__(type(module))
    nn.Module.__init__(twin)
    vars(twin).update({name: _rebound(x, module, twin) for name, x in vars(module).items()})
    vars(twin).pop("_compiled_call_impl", None)  # ``module.compile`` has compiled the original
    own = vars(module).get("forward")
    if own is not None and vars(twin)["forward"] is own:
        raise UnsupportedModelError(
            f"{type(module).__name__} has a forward function of its own, which was set on the "
            f"instance ({getattr(own, '__qualname__', own)}) and cannot be run on a view of it: "
            f"restore the class's forward, or take another method"
        )
    if children is not None:
        vars(twin)["_modules"] = dict(children)
    return twin


def _rebound(value: Any, old: nn.Module, new: nn.Module) -> Any:
    """A method of one instance, or a partial function that was given it (as ``accelerate`` sets
    them), bound to another instance; any other value as it is."""
    if isinstance(value, MethodType) and value.__self__ is old:
        return MethodType(value.__func__, new)
    if isinstance(value, partial) and old in value.args:
        arguments = (new if argument is old else argument for argument in value.args)
        return partial(value.func, *arguments, **value.keywords)
    return value
