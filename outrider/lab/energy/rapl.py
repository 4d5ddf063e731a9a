"""RAPL: the energy counters of processor packages and their memory, as Linux shows them.

Interface: the kernel's ``Documentation/power/powercap``. A zone is a folder such as
``/sys/class/powercap/intel-rapl:0`` (AMD's processors use the same name) with

    name                 package-0, dram, core, uncore, psys
    energy_uj            microjoules since some time
    max_energy_range_uj  where the counter starts again at 0

Counted are packages, and the memory (``dram``) beside them. The zones ``core`` and ``uncore`` are
parts of a package, ``psys`` contains the packages, and ``intel-rapl-mmio`` shows them once more.

Most distributions let only root read ``energy_uj``, since it is a side channel (CVE-2020-8694).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.lab.energy.errors import CounterError

ROOT = Path("/sys/class/powercap")
LONGEST_INTERVAL = 60.0
"""Seconds between two reads that no counter runs through its range in: a package of 1 kW and the
smallest usual range, 65 kJ, need 65."""


@dataclass
class Zone:
    """One counter.

    Attributes:
        name: such as ``package-0`` or ``package-0 dram``.
        file: its energy_uj.
        range: where it starts again, in microjoules.
        last: its last reading, in microjoules.
        total: microjoules since the first reading.
    """

    name: str
    file: Path
    range: int
    last: int
    total: int = 0

    def read(self) -> float:
        """Joules since the first reading. The counter may have started again once since the last
        reading."""
        now = _number(self.file)
        passed = now - self.last
        self.total += passed if passed >= 0 else passed + self.range
        self.last = now
        return self.total / 1e6


class Rapl:
    """The counters of this machine's processors.

    Args:
        root: the folder of power zones.

    Raises:
        CounterError: there are none, or they cannot be read.
    """

    name = "rapl"
    longest_interval: float | None = LONGEST_INTERVAL

    def __init__(self, root: Path = ROOT) -> None:
        self._zones = list(_zones(root))
        if not self._zones:
            raise CounterError(
                f"no energy counters of processors in {root}: the processor, the kernel, or the "
                "virtual machine has none; the meter energy-model estimates instead"
            )

    def read(self) -> Mapping[str, float]:
        """Joules of each zone since the counters were opened.

        Raises:
            CounterError: a counter has vanished.
        """
        return {zone.name: zone.read() for zone in self._zones}


def _zones(root: Path) -> list[Zone]:
    found = []
    for folder in sorted(root.glob("intel-rapl:*")):
        name = _text(folder / "name")
        if folder.name.count(":") == 1 and name.startswith("package"):
            found.append(_zone(name, folder))
            for part in sorted([*folder.glob("intel-rapl:*"), *root.glob(f"{folder.name}:*")]):
                label = f"{name} dram"
                known = {zone.name for zone in found}
                if _text(part / "name") == "dram" and label not in known:
                    found.append(_zone(label, part))
    return found


def _zone(name: str, folder: Path) -> Zone:
    energy = folder / "energy_uj"
    return Zone(name, energy, _number(folder / "max_energy_range_uj"), _number(energy))


def _number(file: Path) -> int:
    text = _text(file)
    try:
        return int(text)
    except ValueError:
        raise CounterError(f"energy counter {file}: {text!r} is no number") from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except PermissionError:
        raise CounterError(
            f"energy counter {file} cannot be read: allow it with `sudo chmod a+r {file}`, which "
            "holds until the next boot, or run as root"
        ) from None
    except (OSError, ValueError) as error:
        raise CounterError(f"energy counter {file} cannot be read: {error}") from None
