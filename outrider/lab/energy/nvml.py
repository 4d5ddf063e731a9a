"""NVML: energy and power of NVIDIA GPUs, by ``nvidia-ml-py``.

The energy counter counts millijoules since the driver was loaded and exists from Volta on. It is
the driver's own integral of the board's power, so it misses no peak between two samples. Counted
are the GPUs that torch can use.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from outrider.lab.energy.errors import CounterError


class NvmlEnergy:
    """The energy counters of GPUs.

    Args:
        uuids: of the GPUs; None takes those that torch can use.
        library: the module ``pynvml``; None imports it.

    Raises:
        CounterError: no GPU, no driver, no package, or GPUs without the counter.
    """

    name = "nvml"
    longest_interval: float | None = None

    def __init__(
        self, uuids: Sequence[str] | None = None, library: ModuleType | Any = None
    ) -> None:
        self._devices = Devices(uuids, library)
        self._first = self._millijoules()

    def read(self) -> Mapping[str, float]:
        """Joules of each GPU since the counters were opened.

        Raises:
            CounterError: a counter has vanished, or has started again as the driver was reloaded.
        """
        found = {}
        for name, now in self._millijoules().items():
            passed = now - self._first[name]
            if passed < 0:
                raise CounterError(f"{name}: its energy counter has started again")
            found[name] = passed / 1000
        return found

    def _millijoules(self) -> dict[str, int]:
        return self._devices.each(self._devices.library.nvmlDeviceGetTotalEnergyConsumption)


class NvmlPower:
    """The power that GPUs draw now; arguments and errors as of :class:`NvmlEnergy`."""

    name = "nvml"

    def __init__(
        self, uuids: Sequence[str] | None = None, library: ModuleType | Any = None
    ) -> None:
        self._devices = Devices(uuids, library)
        self.watts()

    def watts(self) -> float:
        """Of all GPUs together.

        Raises:
            CounterError: a GPU does not tell.
        """
        library = self._devices.library
        return sum(self._devices.each(library.nvmlDeviceGetPowerUsage).values()) / 1000


class Devices:
    """Handles of GPUs; arguments and errors as of :class:`NvmlEnergy`."""

    def __init__(self, uuids: Sequence[str] | None, library: ModuleType | Any) -> None:
        uuids = visible_gpus() if uuids is None else uuids
        if not uuids:
            raise CounterError("torch can use no NVIDIA GPU, so there is no energy counter of one")
        self.library: Any = _library() if library is None else library
        try:
            self.library.nvmlInit()
            self._handles = {
                f"gpu {number}": self.library.nvmlDeviceGetHandleByUUID(uuid)
                for number, uuid in enumerate(uuids)
            }
        except self.library.NVMLError as error:
            raise CounterError(f"the driver of the GPU does not answer: {error}") from None

    def each(self, ask: Callable[[Any], int]) -> dict[str, int]:
        """The answer of each GPU.

        Raises:
            CounterError: one does not answer.
        """
        found = {}
        for name, handle in self._handles.items():
            try:
                found[name] = ask(handle)
            except self.library.NVMLError as error:
                raise CounterError(
                    f"{name} does not tell its energy or power: {error}; GPUs older than Volta "
                    "have no energy counter, and the meter nvml-polling works without"
                ) from None
        return found


def visible_gpus() -> list[str]:
    """The names by which NVML knows the GPUs that torch can use."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"GPU-{each.uuid}" for each in properties]


def _library() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise CounterError(
            "energy of GPUs needs nvidia-ml-py, which is not installed: pip install "
            '"outrider[energy]"'
        ) from error
    return pynvml
