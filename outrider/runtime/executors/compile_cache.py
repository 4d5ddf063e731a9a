"""The compile cache: programs compiled ahead of time and kept on disk.

``torch.export`` traces the program, and Inductor's ahead-of-time mode compiles it to a library,
whose call is one call of C++ without Python inside. Weights stay where they are: the library is
told their addresses. It lies in the user's cache folder under a hash of all that it depends on, so
that later runs need neither trace nor compile.
"""

import copyreg
import hashlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from outrider.core import draw
from outrider.core.chain import draft_chain
from outrider.core.errors import OutriderWarning
from outrider.core.health import health_of
from outrider.runtime.attention_metadata import AttentionSpec, attention_mask
from outrider.runtime.cached_files import LockedError, cached_file, locked, space_note
from outrider.runtime.executors.compiler_units import units_side_by_side
from outrider.runtime.executors.eager import decoder_logits
from outrider.runtime.executors.export import quick_tracing
from outrider.runtime.executors.extracted import load_library
from outrider.runtime.executors.instruction_sets import instruction_sets_known
from outrider.runtime.executors.library import Library
from outrider.runtime.executors.parallel_regions import regions_where_they_pay
from outrider.runtime.executors.program_interface import shared_interface
from outrider.runtime.hardware import processor_name
from outrider.runtime.hf.hidden_states import joined
from outrider.runtime.kernels import (
    NarrowLinear,
    exact,
    is_exact,
    kernels_are_loaded,
    truncation,
)
from outrider.runtime.kernels.graph_passes import KernelPasses
from outrider.runtime.kernels.operators import FUNCTIONS
from outrider.runtime.kv_cache.storage import write_at
from outrider.sampling.truncate import truncated
from outrider.sampling.warp import distributions

Program = Callable[[list[Tensor]], list[Tensor]]
"""A compiled program: from its inputs, one after the other, to its outputs."""

_TRACED = (
    AttentionSpec.metadata,
    attention_mask,
    decoder_logits,
    draft_chain,
    draw,
    exact.use_exact_operators,
    health_of,
    joined,
    distributions,
    regions_where_they_pay,
    truncation.truncated,
    truncated,
    write_at,
)
"""Functions that programs consist of besides the methods of modules: their files are part of the
name of a program."""

PRECOMPILE_HEADERS = False
"""Whether torch's two headers are compiled before the first program. That takes 10 to 15 seconds,
and saves 2 to 7 for each program: it pays from about the fourth on, and the first one comes later.
Needs ``openssl``."""

CPU = torch.device("cpu")
_HANDLE = "AtenTensorHandle"
_LIST = f"const {_HANDLE}*, int64_t"
_SHIMS = {
    "linear": f"{_HANDLE}, {_HANDLE}, const {_HANDLE}*, int64_t, int64_t",
    "linears": f"{_HANDLE}, {_LIST}, {_LIST}, const int64_t*, int64_t, int64_t",
    "attend": f"{_HANDLE}, {_HANDLE}, {_HANDLE}, {_HANDLE}, double, int64_t",
    "mean": f"{_HANDLE}, int32_t",
    "layer_norm": f"{_HANDLE}, const {_HANDLE}*, const {_HANDLE}*, double",
    "truncated": f"{_HANDLE}, {_HANDLE}, {_HANDLE}, {_HANDLE}, {_HANDLE}",
    **dict.fromkeys(FUNCTIONS, _HANDLE),
}


class Missing(Enum):
    """What becomes of a program that the cache folder lacks."""

    COMPILE = "compiled, or awaited where another process compiles it"
    COMPILE_UNLOCKED = "compiled, unless another process compiles it"
    LEAVE = "left for later"


class ProgramMissingError(Exception):
    """A program is not in the cache folder, and is not to be compiled now."""


_MISSING = ContextVar("_MISSING", default=(Missing.COMPILE, list[Path]()))


@contextmanager
def when_missing(choice: Missing) -> Iterator[list[Path]]:
    """Says, for this thread, what becomes of programs that the cache folder lacks; yields a list
    that those which are left are added to."""
    left: list[Path] = []
    token = _MISSING.set((choice, left))
    try:
        yield left
    finally:
        _MISSING.reset(token)


def only_loads() -> bool:
    """Whether programs are loaded in this thread, and none is compiled."""
    return _MISSING.get()[0] is Missing.LEAVE


def compiled_program(
    module: nn.Module,
    trace: Callable[[], ExportedProgram],
    own: bool = False,
    thorough: bool = False,
    device: torch.device = CPU,
) -> Program:
    """The compiled program of a module, from the cache folder or compiled anew.

    Args:
        module: what the program computes.
        trace: traces it.
        own: whether the module is as its class and its configuration say. A user's might be
            patched, so that only the traced program tells what it computes.
        thorough: let the compiler try several ways to multiply and keep the fastest.
        device: where the program runs.

    Raises:
        ProgramMissingError: it is not in the cache folder, and :func:`when_missing` says to leave
            it.
        Exception: whatever the tracer or the compiler raise, which is of many kinds.
    """
    program = None if own else trace()
    parts = [*dependencies(module), str(thorough), *_device_dependencies(device)]
    if program is not None:
        parts += [str(program.graph), str(program.range_constraints)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    path = cached_file("programs", f"{key}.pt2")
    if path.exists():
        try:
            return _load(path, _tensors(module), device)
        except Exception as error:  # of many kinds: a file cut short, a library that is missing
            _warn(f"cannot load the program {path}, so it is compiled anew: {first_line(error)}")
    choice, left = _MISSING.get()
    if choice is Missing.LEAVE:
        left.append(path)
        raise ProgramMissingError(str(path))
    damaged = _identity(path)
    try:
        with locked(path, wait=choice is Missing.COMPILE), quick_tracing():
            if _identity(path) == damaged:  # no other process compiled it in the meantime
                _warn_of_another_version(path.parent)
                found = trace() if program is None else program
                _compile(found, path, _options(module, thorough), device)
    except LockedError as error:
        left.append(path)
        raise ProgramMissingError(str(error)) from error
    except OSError as error:
        raise OSError(f"{first_line(error)}{space_note(path.parent)}") from error
    return _load(path, _tensors(module), device)


def hash_of_sources(*modules: ModuleType) -> str:
    """A hash of the source code of modules, which programs depend on besides their own methods."""
    text = "".join(inspect.getsource(module) for module in modules)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def uses_kernels(module: nn.Module) -> bool:
    """Whether some layer of a module computes with our kernels."""
    return any(isinstance(each, NarrowLinear) for each in module.modules())


def dependencies(module: nn.Module) -> list[str]:
    """All that a program depends on, as far as is known without tracing it."""
    tensors = _tensors(module).items()
    classes = {base for each in module.modules() for base in type(each).__mro__}
    sources = {each.__module__ for each in (*classes, *_TRACED)}
    config: Any = getattr(getattr(module, "module", None), "config", None)
    if config is None:
        config = getattr(module, "config", None)
    parts = [
        torch.__version__,
        transformers.__version__,
        sys.version,
        torch.backends.cpu.get_cpu_capability(),
        processor_name(),  # the C++ compiler takes all of its instructions
        str((uses_kernels(module), kernels_are_loaded(), _SHIMS, KernelPasses().uuid())),
        repr(module),
        str([(name, tuple(x.shape), x.stride(), x.dtype, x.device.type) for name, x in tensors]),
        str([getattr(each, "widest", None) for each in module.modules()]),
        *(inspect.getsource(sys.modules[name]) for name in sorted(sources) if _is_local(name)),
    ]
    if config is not None:
        described = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
        parts += [json.dumps(described, sort_keys=True, default=str), config._attn_implementation]
    return parts


def _device_dependencies(device: torch.device) -> list[str]:
    """What a program for another device than the CPU depends on besides."""
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
    """The compiler's options for a module."""
    options: dict[str, Any] = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.precompile_headers": PRECOMPILE_HEADERS,
        "always_keep_tensor_constants": True,  # else small weights are part of the code
        "size_asserts": False,
        "cpp.dynamic_threads": True,
        "max_autotune": thorough,
        # else it compiles a program per instruction set to see whether the compiler knows them
        "cpp.vec_isa_ok": True if kernels_are_loaded() else None,
        # fused operators round where the model does, so that all programs have the same bits
        "emulate_precision_casts": is_exact(module),
    }
    if level := getattr(module, "optimisation", None):
        options["aot_inductor.compile_wrapper_opt_level"] = level
    if uses_kernels(module):
        options["post_grad_custom_post_pass"] = KernelPasses()
    if kernels_are_loaded():
        options["aot_inductor.custom_ops_to_c_shims"] = {
            getattr(torch.ops.outrider, name).default: [
                f"AOTITorchError aoti_torch_cpu_{name}({arguments}, {_HANDLE}*)"
            ]
            for name, arguments in _SHIMS.items()
        }
    return options


def _compile(
    program: ExportedProgram, path: Path, options: dict[str, Any], device: torch.device
) -> None:
    """Compiles to a file, which appears under its name once it is complete. Tensors that only the
    program has go to a second file beside it."""
    scratch = path.with_suffix(f".{os.getpid()}.pt2")
    literals = path.with_suffix(f".{os.getpid()}.pt")
    try:
        torch.save(_literals(program), literals)
        with warnings.catch_warnings(), torch.no_grad(), ExitStack() as stack:
            stack.enter_context(regions_where_they_pay())
            stack.enter_context(units_side_by_side())
            if device.type == "cpu":
                stack.enter_context(shared_interface())
            stack.enter_context(instruction_sets_known())
            warnings.filterwarnings("ignore", category=FutureWarning, module=copyreg.__name__)
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(scratch), inductor_configs=options
            )
        literals.replace(path.with_suffix(".pt"))
        scratch.replace(path)
    finally:
        literals.unlink(missing_ok=True)
        scratch.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a file from another one that replaces it; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _versions() -> dict[str, str]:
    """What a new version replaces. Processors are not among it: several may use a folder, each with
    programs of its own."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": sys.version.split()[0],
    }


def _warn_of_another_version(folder: Path) -> None:
    """Warns where the programs of a folder were compiled by another version, which cannot be used,
    and notes the version of those to come."""
    file, now = folder / "versions.json", _versions()
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = now
    changed = [f"{name} {before.get(name)}" for name in now if before.get(name) != now[name]]
    if changed:
        _warn(
            f"the programs in {folder} were compiled for {', '.join(changed)}, and are compiled "
            f"anew for {', '.join(f'{name} {now[name]}' for name in now)}; delete the folder to "
            f"free its memory"
        )
    if changed or not file.exists():
        scratch = file.with_suffix(f".{os.getpid()}.json")
        scratch.write_text(json.dumps(now), encoding="utf-8")
        scratch.replace(file)


def _warn(message: str) -> None:
    warnings.warn(message, OutriderWarning, stacklevel=3)


def _literals(program: ExportedProgram) -> dict[str, Tensor]:
    """Tensors that only the program has, such as numbers in the model's code. They become buffers
    of the program, whose names the compiler keeps."""
    literals = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None:
            spec.kind, spec.persistent = InputKind.BUFFER, False
            literals[spec.target] = program.constants[spec.target].detach().clone()
    return literals


def _load(path: Path, tensors: Mapping[str, Tensor], device: torch.device) -> Program:
    library = load_library(path, device)
    names = library.constant_names()
    found = dict(tensors)
    if not set(names) <= set(found):
        found |= torch.load(path.with_suffix(".pt"), weights_only=True)
    return _CompiledProgram(library, {name: found[name] for name in names})


class _CompiledProgram:
    """A compiled library, and the tensors whose addresses it holds."""

    def __init__(self, library: Library, tensors: dict[str, Tensor]) -> None:
        library.use_constants(tensors)
        self._tensors = tensors
        self._run = library.run

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        return self._run(inputs)
