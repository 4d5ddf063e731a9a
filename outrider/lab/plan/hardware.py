"""What a GPU can do, by name or by numbers.

Numbers are the makers' own: memory, read bandwidth, dense bfloat16 operations, and the bandwidth of
the links between the GPUs of one server, per direction. Latencies of links are assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.core.errors import InvalidParameterError

_NVLINK, _PCIE = 5e-6, 15e-6  # seconds of one step of a collective, software included: assumed


@dataclass(frozen=True)
class Accelerator:
    """A GPU, or a processor, in SI units.

    Attributes:
        name: on the plan.
        memory: bytes.
        bandwidth: bytes per second read from memory.
        flops: dense operations per second in the models' number format.
        link_bandwidth: bytes per second to the other GPUs of the server, per direction.
        link_latency: seconds of one step of a collective operation.

    Raises:
        InvalidParameterError: a number that is not above 0; the latency may be 0.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link_bandwidth: float
    link_latency: float = _NVLINK

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "flops", "link_bandwidth"):
            if not getattr(self, name) > 0:
                raise InvalidParameterError(f"{name}={getattr(self, name)!r}: must be above 0")
        if not self.link_latency >= 0:
            raise InvalidParameterError(f"link_latency={self.link_latency!r}: must be 0 or more")


ACCELERATORS = {
    each.name: each
    for each in (
        Accelerator("a100", 80e9, 2.039e12, 312e12, 300e9),
        Accelerator("b200", 180e9, 7.7e12, 2250e12, 900e9),
        Accelerator("h100", 80e9, 3.35e12, 989e12, 450e9),
        Accelerator("h200", 141e9, 4.8e12, 989e12, 450e9),
        Accelerator("l4", 24e9, 300e9, 121e12, 32e9, _PCIE),
        Accelerator("l40s", 48e9, 864e9, 362e12, 32e9, _PCIE),
        Accelerator("mi300x", 192e9, 5.3e12, 1307e12, 448e9),
        Accelerator("rtx4090", 24e9, 1008e9, 165e12, 32e9, _PCIE),
    )
}
"""Known GPUs by name."""


def accelerator(name: str, **numbers: float | None) -> Accelerator:
    """A known GPU, with numbers of one's own in place of some or all of its own.

    Args:
        name: a key of ``ACCELERATORS``, in any case; any other name if all numbers are given.
        numbers: attributes of :class:`Accelerator`; None keeps the GPU's own.

    Raises:
        InvalidParameterError: the name is unknown and a number is missing; or a number is not
            above 0.
    """
    given = {each: number for each, number in numbers.items() if number is not None}
    known = ACCELERATORS.get(name.lower())
    if known is not None:
        return replace(known, **given)  # type: ignore[arg-type]
    needed = {"memory", "bandwidth", "flops", "link_bandwidth"}
    if missing := sorted(needed - given.keys()):
        raise InvalidParameterError(
            f"gpu={name}: not a known GPU ({', '.join(ACCELERATORS)}); for another one pass its "
            f"numbers; missing: {', '.join(missing)}"
        )
    return Accelerator(name, **given)
