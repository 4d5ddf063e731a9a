"""The two-term model of a run's energy: an estimate, never a measurement.

    E = P_mem T_mem + P_flop T_flop,   T_mem = bytes / bandwidth,   T_flop = operations / rate

(MJSD, section 3.3, after Allen and Ge, 2016.) The bytes and operations are counted; the powers, the
bandwidth and the rate are constants. Bandwidth and rate cancel: what counts are the energy per
byte, P_mem / bandwidth, and per operation, P_flop / rate. The model has no idle term, and knows
nothing of clocks, caches, or how well a kernel uses the machine. It compares methods on one
machine: less work is less energy. It does not tell what a meter would.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from outrider.lab.energy.passes import PassCounter, Work


@dataclass(frozen=True)
class TwoTermModel:
    """The constants.

    Attributes:
        memory_watts: P_mem, while the memory is read at full bandwidth.
        bandwidth: bytes per second.
        compute_watts: P_flop, while computing at full rate.
        rate: operations per second.
        source: where the constants come from.
    """

    memory_watts: float
    bandwidth: float
    compute_watts: float
    rate: float
    source: str

    def joules(self, work: Work) -> tuple[float, float]:
        """Estimated joules of reading, and of computing."""
        memory = self.memory_watts * work.num_bytes / self.bandwidth
        return memory, self.compute_watts * work.operations / self.rate


CPU = TwoTermModel(
    memory_watts=3.2,
    bandwidth=20e9,
    compute_watts=8.0,
    rate=100e9,
    source="assumed for a CPU with DDR4: 160 pJ per byte, the lower end of DRAM in Horowitz, "
    "Computing's Energy Problem, ISSCC 2014; 80 pJ per operation, the power of a server processor "
    "(280 W) over its peak in float32 (3.5 Tflop/s)",
)
GPU = TwoTermModel(
    memory_watts=51.0,
    bandwidth=1.6e12,
    compute_watts=400.0,
    rate=312e12,
    source="assumed for a GPU with HBM2: 32 pJ per byte, about 4 pJ per bit as in O'Connor et al., "
    "Fine-Grained DRAM, MICRO 2017; 1.3 pJ per operation, the power of an A100 (400 W) over its "
    "peak in bfloat16 (312 Tflop/s)",
)


class ModelMeter:
    """Estimates the energy of runs from their counted passes.

    Args:
        model: the constants.
        counter: counts the passes.
    """

    def __init__(
        self, model: TwoTermModel, new_counter: Callable[[], PassCounter] = PassCounter
    ) -> None:
        self._model, self._counter = model, new_counter()
        self._counting = ExitStack()

    def begin(self) -> None:
        self._counter.work()
        self._counting = ExitStack()
        self._counting.enter_context(self._counter.counting())

    def end(self) -> Mapping[str, Any]:
        self._counting.close()
        by_model = self._counter.work()
        work = sum(by_model.values(), Work())
        memory, compute = self._model.joules(work)
        return {
            "joules": memory + compute,
            "joules_above_idle": memory + compute,
            "estimate": True,
            "source": "estimate by a two-term model",
            "memory_joules": memory,
            "compute_joules": compute,
            "work": {name: asdict(each) for name, each in by_model.items()},
            "constants": asdict(self._model),
        }
