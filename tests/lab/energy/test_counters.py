"""Energy counters: RAPL on folders made for the test, NVML by a stand-in, polling by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.lab.bench.metric import METERS
from outrider.lab.energy import meters
from outrider.lab.energy.counters import CounterMeter, idle_watts
from outrider.lab.energy.errors import CounterError
from outrider.lab.energy.model import ModelMeter
from outrider.lab.energy.nvml import NvmlEnergy, NvmlPower
from outrider.lab.energy.polling import PollingMeter, Repeating, Samples
from outrider.lab.energy.rapl import LONGEST_INTERVAL, Rapl

RANGE = 65_532_610_987


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def zone(root: Path, folder: str, name: str, energy: int = 0) -> Path:
    made = root / folder
    made.mkdir(parents=True)
    (made / "name").write_text(f"{name}\n")
    (made / "energy_uj").write_text(f"{energy}\n")
    (made / "max_energy_range_uj").write_text(f"{RANGE}\n")
    return made / "energy_uj"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two packages, one with memory beside it, and zones that overlap them."""
    zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 7)
    zone(tmp_path, "intel-rapl:0:1", "dram", 500_000)
    zone(tmp_path, "intel-rapl:1", "package-1", 2_000_000)
    zone(tmp_path, "intel-rapl:2", "psys", 9)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 9)
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def spend(root: Path, **microjoules: int) -> None:
    for folder, amount in microjoules.items():
        file = root / folder.replace("zone_", "intel-rapl:").replace("_", ":") / "energy_uj"
        file.write_text(str((int(file.read_text()) + amount) % RANGE))


def test_packages_and_memory_are_counted_once(machine: Path) -> None:
    rapl = Rapl(machine)
    spend(machine, zone_0=3_000_000, zone_0_0=1_000_000, zone_0_1=500_000, zone_1=250_000)
    assert rapl.read() == pytest.approx({"package-0": 3, "package-0 dram": 0.5, "package-1": 0.25})


def test_a_counter_that_starts_again_goes_on(machine: Path) -> None:
    """Twice, with a reading in between."""
    rapl = Rapl(machine)
    for _ in range(3):
        spend(machine, zone_0=40_000_000_000)
        total = rapl.read()["package-0"]
    assert total == pytest.approx(120_000)
    assert rapl.longest_interval == LONGEST_INTERVAL


def test_a_machine_without_counters_is_named(tmp_path: Path) -> None:
    with pytest.raises(CounterError, match="no energy counters of processors"):
        Rapl(tmp_path)
    with pytest.raises(CounterError, match="no energy counters"):
        Rapl(tmp_path / "missing")


def test_a_counter_that_is_no_number_is_named(machine: Path) -> None:
    (machine / "intel-rapl:0" / "energy_uj").write_text("none")
    with pytest.raises(CounterError, match="'none' is no number"):
        Rapl(machine)


def test_a_counter_that_may_not_be_read_names_the_remedy(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.read_text

    def denied(path: Path, *arguments: Any, **settings: Any) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **settings)

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(CounterError, match="sudo chmod"):
        Rapl(machine)


def test_joules_with_and_without_idle(machine: Path) -> None:
    clock = Clock()
    meter = CounterMeter([Rapl(machine)], idle_watts=0.5, clock=clock)
    meter.begin()
    clock.now += 4
    spend(machine, zone_0=3_000_000, zone_1=2_000_000)
    reading = meter.end()
    assert reading["joules"] == pytest.approx(5)
    assert reading["joules_above_idle"] == pytest.approx(3)
    assert reading["domains"]["package-1"] == pytest.approx(2)
    assert not reading["estimate"]
    meter.begin()  # the next run begins at 0
    assert meter.end()["joules"] == 0


def test_idle_power_is_measured(machine: Path) -> None:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds
        spend(machine, zone_0=round(2_000_000 * seconds))

    assert idle_watts([Rapl(machine)], 5, sleep, clock) == pytest.approx(2)


def test_a_counter_that_vanishes_leaves_the_run_without_joules(machine: Path) -> None:
    """The reading has the error, nothing raises, and a later run is measured again."""
    meter = CounterMeter([Rapl(machine)], idle_watts=0.5)
    file = machine / "intel-rapl:1" / "energy_uj"
    meter.begin()
    file.rename(file.with_suffix(".gone"))
    reading = meter.end()
    assert reading["joules"] is None
    assert "intel-rapl:1" in reading["error"]
    meter.begin()  # still gone when the next run begins
    file.with_suffix(".gone").rename(file)
    assert meter.end()["joules"] is None
    meter.begin()
    assert meter.end()["joules"] == 0


class Nvml:
    """What this project uses of ``pynvml``, for two GPUs."""

    class NVMLError(Exception):
        """As that of the package."""

    def __init__(self) -> None:
        self.millijoules = {"GPU-a": 10_000, "GPU-b": 90_000}
        self.milliwatts = {"GPU-a": 50_000, "GPU-b": 20_000}
        self.lost = False

    def nvmlInit(self) -> None:
        self._check()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._check()
        return self.millijoules[handle]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._check()
        return self.milliwatts[handle]

    def _check(self) -> None:
        if self.lost:
            raise self.NVMLError("GPU is lost")


GPUS = ["GPU-a", "GPU-b"]


def test_the_counters_of_gpus() -> None:
    library = Nvml()
    energy = NvmlEnergy(GPUS, library)
    library.millijoules["GPU-b"] += 2500
    assert energy.read() == pytest.approx({"gpu 0": 0, "gpu 1": 2.5})
    assert NvmlPower(GPUS, library).watts() == pytest.approx(70)


def test_a_gpu_that_is_lost_during_a_run() -> None:
    library = Nvml()
    meter = CounterMeter([NvmlEnergy(GPUS, library)])
    meter.begin()
    library.lost = True
    reading = meter.end()
    assert reading["joules"] is None
    assert "GPU is lost" in reading["error"]
    with pytest.raises(CounterError, match="driver"):
        NvmlEnergy(GPUS, library)


def test_a_driver_that_is_reloaded_is_noticed() -> None:
    library = Nvml()
    energy = NvmlEnergy(GPUS, library)
    library.millijoules["GPU-a"] = 3
    with pytest.raises(CounterError, match="started again"):
        energy.read()


def test_no_gpu_is_named() -> None:
    with pytest.raises(CounterError, match="no NVIDIA GPU"):
        NvmlEnergy([], Nvml())


class Ramp:
    """Power that grows by 10 W per second."""

    name = "ramp"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.vanished = False

    def watts(self) -> float:
        if self.vanished:
            raise CounterError("the sensor has vanished")
        return 10 * (self._clock.now - 100)


def test_samples_are_added_up_as_in_the_paper_or_integrated() -> None:
    """0, 10, 20 and 30 W at 0, 1, 2 and 3 s: 60 J without the first sample, and ∫ 10 t = 45 J."""
    clock = Clock()
    samples = Samples(Ramp(clock), clock)
    for _ in range(4):
        samples.take()
        clock.now += 1
    assert samples.joules("sum", 1.0) == pytest.approx(60)
    assert samples.joules("trapezoid", 1.0) == pytest.approx(45)


def test_the_ends_of_a_run_are_samples() -> None:
    clock = Clock()
    meter = PollingMeter(Ramp(clock), "trapezoid", interval=1000, clock=clock)
    meter.begin()
    clock.now += 2
    reading = meter.end()
    assert reading["joules"] == pytest.approx(20)
    assert reading["samples"] == 2
    assert not reading["estimate"]


def test_a_run_shorter_than_the_interval_has_no_joules() -> None:
    clock = Clock()
    meter = PollingMeter(Ramp(clock), "sum", interval=1000, clock=clock)
    meter.begin()
    reading = meter.end()
    assert reading["joules"] is None
    assert "shorter than 1000 s" in reading["error"]


def test_a_sensor_that_vanishes_leaves_the_run_without_joules() -> None:
    clock = Clock()
    power = Ramp(clock)
    meter = PollingMeter(power, "trapezoid", interval=1000, clock=clock)
    meter.begin()
    power.vanished = True
    reading = meter.end()
    assert reading["joules"] is None
    assert reading["error"] == "the sensor has vanished"


def test_a_thread_polls_until_it_is_stopped() -> None:
    import threading

    seen = threading.Semaphore(0)
    repeating = Repeating(seen.release, 0.001)
    for _ in range(3):
        assert seen.acquire(timeout=60)
    repeating.stop()
    while seen.acquire(blocking=False):
        pass
    assert not seen.acquire(blocking=False)


def test_where_there_is_no_counter_the_model_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise CounterError("none")

    monkeypatch.setattr(meters, "_KINDS", (missing, missing))
    assert isinstance(METERS.find("energy").open(), ModelMeter)
    assert {"energy", "rapl", "nvml", "nvml-polling", "energy-model"} <= set(METERS.names())


def test_all_counters_that_there_are_add_up(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nvml()
    monkeypatch.setattr(
        meters, "_KINDS", (lambda: NvmlEnergy(GPUS, library), lambda: Rapl(machine))
    )
    monkeypatch.setattr(meters, "idle_watts", lambda counters: 0.0)
    meter = METERS.find("energy").open()
    meter.begin()
    library.millijoules["GPU-a"] += 1000
    spend(machine, zone_0=2_000_000)
    reading = meter.end()
    assert reading["joules"] == pytest.approx(3)
    assert reading["source"] == "nvml and rapl"


def test_gpus_are_those_that_torch_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from outrider.lab.energy.nvml import visible_gpus

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="12-ab")
    )
    assert visible_gpus() == ["GPU-12-ab"]
