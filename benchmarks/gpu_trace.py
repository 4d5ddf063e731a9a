"""What a device did during rounds: how long it had nothing to do, how often the host waited for it.

From the profiler's Chrome trace. A *gap* is time of a round in which no kernel, copy or fill runs;
the profiler itself slows the host down and so widens gaps, so its busy time is to be held against
rounds that were timed without it. A copy from or to memory that is not pinned waits for the device.
``sync_places`` says where in the code the host waits, by CUDA's own debug mode.
"""

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function, supported_activities

ROUND = "outrider round"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Activity:
    """A device during rounds, on average of one.

    Attributes:
        round_ms: the round, under the profiler.
        busy_ms: of it, with a kernel, copy or fill on the device.
        kernels: that ran.
        launches: calls that launched them.
        waits: calls by which the host waits for the device, by name.
        copies: between host and device, by kind; those of pageable memory are waits, too.
    """

    round_ms: float
    busy_ms: float
    kernels: float
    launches: float
    waits: dict[str, float]
    copies: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        gaps = 1 - self.busy_ms / self.round_ms
        return {**vars(self), "gaps_under_profiler": gaps}


def activity(events: Iterable[dict[str, Any]]) -> Activity | None:
    """What a trace says of its rounds; None where no device is in it."""
    events = [event for event in events if event.get("ph") == "X"]
    rounds = [(e["ts"], e["ts"] + e["dur"]) for e in events if _is_round(e)]
    inside = [e for e in events if any(begin <= e["ts"] < end for begin, end in rounds)]
    device = [e for e in inside if e.get("cat") in _ON_DEVICE]
    if not device:
        return None
    names = Counter(e["name"] for e in inside if e.get("cat") in _CALLS)
    copies = Counter(e["name"] for e in device if e["cat"] == "gpu_memcpy")
    num = len(rounds)

    def each(counts: Counter[str], wanted: Callable[[str], bool]) -> dict[str, float]:
        return {name: count / num for name, count in sorted(counts.items()) if wanted(name)}

    return Activity(
        round_ms=sum(end - begin for begin, end in rounds) / num / 1000,
        busy_ms=_covered((e["ts"], e["ts"] + e["dur"]) for e in device) / num / 1000,
        kernels=sum(e["cat"] == "kernel" for e in device) / num,
        launches=sum(each(names, lambda name: name.startswith(_LAUNCHES)).values()),
        waits=each(names, lambda name: "Synchronize" in name or name == "cudaMemcpy"),
        copies=each(copies, lambda name: "HtoD" in name or "DtoH" in name),
    )


def traced(step: Callable[[], object], rounds: int) -> Activity | None:
    """Runs so many rounds under the profiler."""
    with profile(activities=supported_activities()) as profiler:
        for _ in range(rounds):
            with record_function(ROUND):
                step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return activity(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def sync_places(step: Callable[[], object], rounds: int) -> dict[str, float]:
    """Where the host waits for the device, ``file:line``, and how often in a round. Explicit calls
    of ``torch.cuda.synchronize`` are not among them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(rounds):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    counts = Counter(f"{_short(w.filename)}:{w.lineno}" for w in waits)
    return {place: count / rounds for place, count in counts.most_common()}


def _is_round(event: dict[str, Any]) -> bool:
    return event["name"] == ROUND and event.get("cat") == "user_annotation"


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _short(path: str) -> str:
    """A file of the project by its place in it, any other by its last two parts."""
    file = Path(path)
    return str(file.relative_to(_ROOT)) if file.is_relative_to(_ROOT) else "/".join(file.parts[-2:])
