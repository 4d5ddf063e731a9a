"""What a measurement depends on besides the method: code, machine, models, settings and data."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider.lab.bench.method_spec import MethodSpec
from outrider.lab.bench.plan import EMBEDDED, BenchPlan, DataSpec
from outrider.lab.data import DataSet
from outrider.lab.metadata import command_line, hardware, run_metadata
from outrider.lab.versions import versions
from outrider.runtime import HFModel

PACKAGE = Path(outrider.__file__).parent
MEASURED = (
    "core",
    "sampling",
    "runtime",
    "drafters",
    "verifiers",
    "methods",
    "engine",
    "options.py",
    "lab/bench/measure.py",
)
"""The parts of the package that run while a cell is timed."""


@cache
def source_hash(package: Path = PACKAGE, parts: tuple[str, ...] = MEASURED) -> str:
    """A hash of the source code that runs while a cell is timed. It covers changes that are not
    committed, and installations without git."""
    digest = sha256()
    for part in parts:
        path = package / part
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in (".py", ".cpp", ".h", ".cu", ".json"):
                digest.update(str(file.relative_to(package)).encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def commit(folder: Path = PACKAGE) -> str | None:
    """The commit of the checkout, with ``+`` where files differ from it; None outside of one."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head[:12] + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def shared_identity(plan: BenchPlan, target: HFModel, weights: str) -> dict[str, Any]:
    """What all cells of a plan depend on, as JSON."""
    return {
        "versions": versions(),
        "source": source_hash(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "target": weights,
        "dtype": str(target.dtype),
        "device": str(target.device),
        "top_k": plan.top_k,
        "top_p": plan.top_p,
        "min_p": plan.min_p,
        "seed": plan.seed,
        "max_new_tokens": plan.max_new_tokens,
        "ignore_eos": plan.ignore_eos,
        "stop": list(plan.stop),
        "compile": plan.compile,
        "exact": plan.exact,
        "kv_dtype": plan.kv_dtype,
        "quantize_target": plan.quantize_target,
        "quantize_draft": plan.quantize_draft,
        "generation_config": plan.generation_config,
        "remember": plan.remember,
        "meters": sorted(plan.meters),  # a repeat without their readings cannot stand for one with
    }


def method_identity(spec: MethodSpec, weights: str | None) -> dict[str, Any]:
    """The weights of a method's draft, and the contents of the files that its options name."""
    files = {
        name: sha256(Path(value).read_bytes()).hexdigest()
        for name, value in spec.options.items()
        if isinstance(value, str) and value and Path(value).is_file()
    }
    return {"draft": weights, "files": files}


def data_identity(data: DataSet, spec: DataSpec) -> dict[str, Any]:
    """The file, and which of its examples are used how."""
    chosen = sha256("\0".join(example.id for example in data).encode()).hexdigest()[:16]
    how = {"prompts": spec.prompts, "forced": spec.forced}
    return {"data": data.sha256, "examples": chosen, **how}


@cache
def machine() -> str:
    """The processor or GPU, and the host's name."""
    return f"{hardware()}, {platform.node()}"


def environment(plan: BenchPlan, target: HFModel, **more: Any) -> dict[str, Any]:
    """Everything that a reader needs to repeat a measurement, for results and reports."""
    settings: Mapping[str, Any] = plan.as_dict()
    return run_metadata(
        host=platform.node(),
        platform=platform.platform(),
        commit=commit(),
        source=source_hash(),
        command=command_line(),
        model=EMBEDDED if plan.target == EMBEDDED else target.name,  # not where it is installed
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        plan=dict(settings),
        **more,
    )
