"""Activity of a device during rounds: its idle time, and how often the host waits for it.

The data comes from the profiler's Chrome trace. A *gap* is time of a round in which no kernel, copy
or fill runs. The profiler slows the host down, which widens gaps, so the busy time should be
compared with rounds timed without it. A copy from or to pageable memory waits for the device.
``sync_places`` uses CUDA's debug mode to find where in the code the host waits.
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
    """The activity of a device per round, on average.

    Attributes:
        round_ms: time of the round, under the profiler.
        busy_ms: time in which a kernel, copy or fill runs on the device.
        kernels: number of kernels.
        launches: number of calls that launch kernels.
        waits: calls by which the host waits for the device, by name.
        copies: copies between host and device, by kind; those of pageable memory wait too.
    """

    round_ms: float
    busy_ms: float
    kernels: float
    launches: float
    waits: dict[str, float]
    copies: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """The activity as a JSON document."""
        gaps = 1 - self.busy_ms / self.round_ms
        return {**vars(self), "gaps_under_profiler": gaps}


def activity(events: Iterable[dict[str, Any]]) -> Activity | None:
    """The activity in a trace; None if the trace contains no device."""
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
    """Runs rounds under the profiler; None without a device."""
    with profile(activities=supported_activities()) as profiler:
        for _ in range(rounds):
            with record_function(ROUND):
                step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return activity(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def sync_places(step: Callable[[], object], rounds: int) -> dict[str, float]:
    """Waits of the host for the device per round, by ``file:line``.

    Explicit calls of ``torch.cuda.synchronize`` are not counted.
    """
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
    return {line: count / rounds for line, count in counts.most_common()}


def _is_round(event: dict[str, Any]) -> bool:
    return event["name"] == ROUND and event.get("cat") == "user_annotation"


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _short(path: str) -> str:
    """The path within the project, or the last two parts of any other path."""
    file = Path(path)
    return str(file.relative_to(_ROOT)) if file.is_relative_to(_ROOT) else "/".join(file.parts[-2:])
