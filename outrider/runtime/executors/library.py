"""A compiled program that is loaded: its library, by our own operators or by torch's binding."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Protocol
from weakref import finalize

import torch
from torch import Tensor
from torch.export.pt2_archive._package import AOTICompiledModel


class Library(Protocol):
    """A program that is loaded, as long as it lives."""

    def constant_names(self) -> list[str]:
        """Names of the tensors whose addresses it wants."""

    def use_constants(self, tensors: dict[str, Tensor]) -> None:
        """Tells it all of these addresses; the caller keeps the tensors."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Its outputs."""


class SharedLibrary:
    """A program whose calls let Python's other threads run (``program.cpp``)."""

    def __init__(self, path: Path) -> None:
        """Loads the library at ``path``, which is not needed afterwards."""
        operators = torch.ops.outrider
        self._address = operators.load_program(str(path))
        # not by an operator: garbage may be collected while torch records those that are called
        free = ctypes.CDLL(None).outrider_free_program
        finalize(self, free, ctypes.c_int64(self._address))
        self._run = operators.run_program.default

    def constant_names(self) -> list[str]:
        return list(torch.ops.outrider.constant_names(self._address))

    def use_constants(self, tensors: dict[str, Tensor]) -> None:
        torch.ops.outrider.use_constants(self._address, list(tensors), list(tensors.values()))

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = self._run(self._address, inputs)
        return outputs


class TorchLibrary:
    """A program by torch's own binding, whose calls keep Python's other threads from running."""

    def __init__(self, path: Path, device: torch.device) -> None:
        index = -1 if device.index is None else device.index
        # Single-threaded, else no CUDA graph can capture it. ``aoti_load_package`` would do the
        # same, but first start processes, for 0.9 s, that try which vector instructions there are.
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)

    def constant_names(self) -> list[str]:
        names: list[str] = self._loader.get_constant_fqns()
        return names

    def use_constants(self, tensors: dict[str, Tensor]) -> None:
        model = AOTICompiledModel(self._loader)
        model.load_constants(tensors, check_full_update=True, user_managed=True)

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs: list[Tensor] = self._loader.run(inputs)
        return outputs
