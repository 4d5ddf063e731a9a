"""Compiled programs without a compiler: torch runs the traced program."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.export import ExportedProgram
from torch.func import functional_call

from outrider import Engine
from outrider.runtime import HFModel
from outrider.runtime.executors.compile_cache import Program, dependencies
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.fused_verification import CompiledVerifier
from outrider.runtime.executors.own_code import own_code

_PROGRAMS: dict[str, ExportedProgram] = {}
_GRAPHS: dict[str | None, nn.Module] = {}
_OURS = ("outrider", "torch", "transformers")


def interpreted(module: nn.Module, trace: Callable[[], ExportedProgram]) -> Program:
    """A graph run by torch itself: what is compiled, without what compiles."""
    key, program = _key(module), traced(module, trace)
    if key not in _GRAPHS:
        _GRAPHS[key] = program.module(check_guards=False)
    run, spec, weights = _GRAPHS[key], program.call_spec.in_spec, program.state_dict
    if key is None:
        del _GRAPHS[key]

    def graph(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        arguments, _ = pytree.tree_unflatten(inputs, spec)
        return list(functional_call(run, weights, tuple(arguments), tie_weights=False))

    return graph


def traced(module: nn.Module, trace: Callable[[], ExportedProgram]) -> ExportedProgram:
    """The program of a module, with the module's weights. Tracing takes seconds, so modules without
    patched methods share programs, under the key that compiled programs have."""
    key = _key(module)
    if key is None:
        return trace()
    if key not in _PROGRAMS:
        _PROGRAMS[key] = trace()
    program = copy.copy(_PROGRAMS[key])
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    program._state_dict = {name: tensors[name] for name in program.state_dict}
    return program


class InterpretedDrafts(CompiledExecutor):
    """The executor of a draft model, run by interpreted graphs; counts the drafts they make."""

    drafts = 0

    def __init__(self, model: HFModel) -> None:
        super().__init__(model.module, model.spec, "draft", interpreted)

    def draft(self, *arguments: Any) -> Any:
        found = super().draft(*arguments)
        self.drafts += found is not None
        return found


def untraced(each: Any) -> Program:
    """A pass, or a rule's program, called as a graph: without tracing it either."""
    return own_code(each)


def without_compiler(engine: Engine, *, traces_rules: bool = True) -> Engine:
    """Makes the engine run its compiled verification by interpreted graphs, if it has any.

    Args:
        engine: the engine.
        traces_rules: whether the rules' programs are traced. Tests of drafts need not: those of
            ``engine/test_fused_verification.py`` trace the programs of all rules.
    """
    if engine.verification is not None:
        make = lambda module, trace, own: (  # noqa: E731
            interpreted(module, trace) if traces_rules else untraced(module)
        )
        shape = engine.drafter.capabilities.tree_shape
        engine.verification = CompiledVerifier(make, shape)
    return engine


def _key(module: nn.Module) -> str | None:
    """What modules of one program have in common; None if nobody shares that of this one."""
    modules = list(module.modules())
    if any("forward" in vars(each) or not _is_ours(type(each)) for each in modules):
        return None
    return "\0".join(dependencies(module))


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] in _OURS
