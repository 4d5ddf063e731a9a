"""Programs compiled ahead of time, kept on disk: a call is one call of C++, without Python inside.

``torch.export`` gives the program, Inductor's ahead-of-time mode the library. Weights stay where
they are: the library is told their addresses. It lies in the user's cache folder under a name
that says what it was made from, so that later runs need neither trace nor compile.
"""

import copyreg
import hashlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from outrider.core import draw
from outrider.runtime.health import health_of
from outrider.runtime.kernels import NarrowLinear, exact, is_exact
from outrider.runtime.kernels.build import cache_folder
from outrider.runtime.kernels.join import JoinLinears
from outrider.runtime.masks import chain_mask

Graph = Callable[[list[Tensor]], list[Tensor]]
"""A compiled pass: its inputs one after the other, its outputs."""

CPU = torch.device("cpu")
_HANDLE = "AtenTensorHandle"
_LIST = f"const {_HANDLE}*, int64_t"
_SHIMS = {
    "linear": f"{_HANDLE}, {_HANDLE}, const {_HANDLE}*, int64_t, int64_t",
    "linears": f"{_HANDLE}, {_LIST}, {_LIST}, const int64_t*, int64_t, int64_t",
    "attend": f"{_HANDLE}, {_HANDLE}, {_HANDLE}, {_HANDLE}, double",
    "mean": f"{_HANDLE}, int32_t",
    "layer_norm": f"{_HANDLE}, const {_HANDLE}*, const {_HANDLE}*, double",
    **dict.fromkeys(exact.FUNCTIONS, _HANDLE),
}


def compiled_program(
    module: nn.Module,
    trace: Callable[[], ExportedProgram],
    own: bool = False,
    thorough: bool = False,
    device: torch.device = CPU,
) -> Graph:
    """The graph of a pass, from the cache folder or made anew.

    Args:
        module: the pass.
        trace: gives its program.
        own: whether the module is as its class and its configuration say. Another's might be
            patched, so that only its program tells what it computes.
        thorough: let the compiler try several ways to multiply and keep the fastest.
        device: where it runs.

    Raises:
        Exception: whatever the tracer or the compiler raise, which is of many kinds.
    """
    program = None if own else trace()
    parts = [*made_from(module), str(thorough), *_made_for(device)]
    if program is not None:
        parts += [str(program.graph), str(program.range_constraints)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    path = cache_folder() / "graphs" / f"{key}.pt2"
    if not path.exists():
        _compile(trace() if program is None else program, path, _options(module, thorough))
    return _load(path, _tensors(module), device)


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def uses_kernels(module: nn.Module) -> bool:
    """Whether some layer of a module computes by our kernels."""
    return any(isinstance(each, NarrowLinear) for each in module.modules())


def made_from(module: nn.Module) -> list[str]:
    """All that a program depends on, so far as it can be told without tracing it."""
    tensors = _tensors(module).items()
    classes = {base for each in module.modules() for base in type(each).__mro__}
    called = (chain_mask, draw, health_of, exact.use_exact_operators)
    sources = {each.__module__ for each in (*classes, *called)}
    config: Any = getattr(getattr(module, "module", None), "config", None)
    parts = [
        torch.__version__,
        transformers.__version__,
        sys.version,
        torch.backends.cpu.get_cpu_capability(),
        str((uses_kernels(module), _SHIMS, JoinLinears().uuid())),
        repr(module),
        str([(name, tuple(x.shape), x.stride(), x.dtype, x.device.type) for name, x in tensors]),
        str([getattr(each, "widest", None) for each in module.modules()]),
        *(inspect.getsource(sys.modules[name]) for name in sorted(sources) if _is_local(name)),
    ]
    if config is not None:
        described = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
        parts += [json.dumps(described, sort_keys=True, default=str), config._attn_implementation]
    return parts


def _made_for(device: torch.device) -> list[str]:
    """What a program depends on besides, where it is not for the CPU."""
    if device.type == "cuda":
        return ["cuda", torch.cuda.get_device_name(device), str(torch.version.cuda)]
    return [] if device.type == "cpu" else [device.type]


def _is_local(name: str) -> bool:
    return name.split(".")[0] not in ("torch", "transformers", "builtins") and name in sys.modules


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, under each of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {name: tensor.detach() for name, tensor in (*parameters, *buffers)}


def _options(module: nn.Module, thorough: bool) -> dict[str, Any]:
    """How the compiler treats the program of a module."""
    options: dict[str, Any] = {
        "aot_inductor.package_constants_in_so": False,
        "always_keep_tensor_constants": True,  # else small weights are part of the code
        "size_asserts": False,
        "cpp.dynamic_threads": True,
        "max_autotune": thorough,
        # fused operators round where the model does, so that all programs have the same bits
        "emulate_precision_casts": is_exact(module),
    }
    if uses_kernels(module):
        options["post_grad_custom_post_pass"] = JoinLinears()
        options["aot_inductor.custom_ops_to_c_shims"] = {
            getattr(torch.ops.outrider, name).default: [
                f"AOTITorchError aoti_torch_cpu_{name}({arguments}, {_HANDLE}*)"
            ]
            for name, arguments in _SHIMS.items()
        }
    return options


def _compile(program: ExportedProgram, path: Path, options: dict[str, Any]) -> None:
    """Compiles to a file that appears when it is whole; what the program itself holds besides the
    module's tensors goes beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.pt2")
    torch.save(_literals(program), path.with_suffix(".pt"))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", category=FutureWarning, module=copyreg.__name__)
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(scratch), inductor_configs=options
        )
    scratch.replace(path)


def _literals(program: ExportedProgram) -> dict[str, Tensor]:
    """Tensors that only the program knows, such as numbers in the model's code; from now on they
    are buffers of it, whose names the compiler keeps."""
    literals = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None:
            spec.kind, spec.persistent = InputKind.BUFFER, False
            literals[spec.target] = program.constants[spec.target].detach().clone()
    return literals


def _load(path: Path, tensors: Mapping[str, Tensor], device: torch.device) -> Graph:
    index = -1 if device.index is None else device.index
    package = torch._inductor.aoti_load_package(
        str(path), run_single_threaded=True, device_index=index
    )  # single-threaded, for else no CUDA graph could record it
    names = package.get_constant_fqns()
    found = dict(tensors)
    if not set(names) <= set(found):
        found |= torch.load(path.with_suffix(".pt"), weights_only=True)
    return _CompiledProgram(package, {name: found[name] for name in names})


class _CompiledProgram:
    """A graph, and the tensors whose addresses its library holds."""

    def __init__(self, package: Any, tensors: dict[str, Tensor]) -> None:
        package.load_constants(tensors, check_full_update=True, user_managed=True)
        self._package, self._tensors = package, tensors
        self._run = package.loader.run

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = self._run(inputs)
        return outputs
