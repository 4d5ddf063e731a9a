"""The meters of energy that ``outrider bench`` knows by name.

    energy        the machine's counters: GPUs and processors; where there are none, the model
    rapl          processors and their memory
    nvml          GPUs
    nvml-polling  GPUs, as the MJSD paper measured: one sample of power per second
    energy-model  the two-term model, an estimate

A reading has ``joules``, ``joules_above_idle`` and ``estimate``. ``joules`` is None where a counter
failed, and ``error`` says why. Idle power is measured when a meter is opened.
"""

from collections.abc import Callable, Sequence

import torch

from outrider.lab.bench.metric import Meter, meter
from outrider.lab.energy.counters import Counter, CounterMeter, idle_watts
from outrider.lab.energy.errors import CounterError
from outrider.lab.energy.model import CPU, GPU, ModelMeter
from outrider.lab.energy.nvml import NvmlEnergy, NvmlPower
from outrider.lab.energy.polling import PollingMeter
from outrider.lab.energy.rapl import Rapl

_KINDS: tuple[Callable[[], Counter], ...] = (NvmlEnergy, Rapl)


@meter("energy")
def open_energy() -> Meter:
    """All counters that there are; the model if there are none."""
    counters = available_counters(_KINDS)
    return _of_counters(counters) if counters else open_model()


@meter("rapl")
def open_rapl() -> Meter:
    """Raises CounterError where there are no counters of processors."""
    return _of_counters([Rapl()])


@meter("nvml")
def open_nvml() -> Meter:
    """Raises CounterError where there are no counters of GPUs."""
    return _of_counters([NvmlEnergy()])


@meter("nvml-polling")
def open_nvml_polling() -> Meter:
    """Raises CounterError where no GPU tells its power."""
    return PollingMeter(NvmlPower(), "sum")


@meter("energy-model")
def open_model() -> Meter:
    """The two-term model with the constants of a GPU where torch can use one, else of a CPU."""
    return ModelMeter(GPU if torch.cuda.is_available() else CPU)


def available_counters(kinds: Sequence[Callable[[], Counter]]) -> list[Counter]:
    """The counters that this machine has and lets us read."""
    found = []
    for open_kind in kinds:
        try:
            found.append(open_kind())
        except CounterError:
            continue
    return found


def _of_counters(counters: Sequence[Counter]) -> Meter:
    return CounterMeter(counters, idle_watts(counters))
