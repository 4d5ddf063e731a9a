"""CUDA graphs around compiled passes: all kernels of a pass, or of a whole draft, in one launch.

A program compiled ahead of time still launches its kernels one by one, some hundred of them for a
model of sixteen layers, several microseconds each. A CUDA graph has recorded them once, with the
addresses that they read and write, and launches them together. So what differs from pass to pass
(tokens, lengths, masks, random numbers) is copied to where the recording reads it, KV buffers
are part of the recording, and results are copied out before the next one overwrites them. Spans
are rounded up to few sizes, lest every pass need a recording of its own; what lies behind a pass's
own span is hidden by its mask.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.export import ExportedProgram

from outrider.core.errors import OutriderWarning
from outrider.runtime.executors.compile_cache import Graph
from outrider.runtime.executors.compiled import Maker
from outrider.runtime.executors.traced import TreePass

Replay = Callable[[], None]
Key = tuple[tuple[object, ...], ...]
_FIRST_SPAN = 64
_PER_OCTAVE = 4
_MOST_RECORDINGS = 32


class Recorder(Protocol):
    """What records launches."""

    def __call__(self, run: Callable[[], list[Tensor]]) -> tuple[Replay, list[Tensor]]:
        """What launches again all that ``run`` launches, and the tensors where each launch leaves
        its results; nothing need have been computed yet."""


class CudaRecorder:
    """Records on a GPU. The recordings share their memory, so that one's results last until the
    next one runs.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], list[Tensor]]) -> tuple[Replay, list[Tensor]]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            # other threads, such as a server's, may allocate meanwhile
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            results = run()
        return graph.replay, results


class RecordedGraph:
    """A compiled pass that is recorded when sizes and KV buffers come back, and replayed from then
    on.

    The first time it runs as it is: some come once only, and libraries set themselves up in it.
    What cannot be recorded goes on as it is, after one warning.

    Args:
        graph: the pass. All that it launches may depend on the sizes of its inputs, and nothing on
            their numbers.
        num_moving: how many of its first inputs come from another place every time; the others
            are its KV buffers.
        record: records launches.
        name: how messages call it.
    """

    def __init__(self, graph: Graph, num_moving: int, record: Recorder, name: str) -> None:
        self._graph = graph
        self._num_moving = num_moving
        self._record: Recorder | None = record
        self._name = name
        self._recordings: OrderedDict[Key, _Recording | None] = OrderedDict()

    @property
    def num_recordings(self) -> int:
        """Recordings that there are now."""
        return sum(each is not None for each in self._recordings.values())

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        if self._record is None:
            return self._graph(inputs)
        moving, buffers = inputs[: self._num_moving], inputs[self._num_moving :]
        key = (
            *((each.shape, each.dtype) for each in moving),
            *((each.data_ptr(), each.shape, each.stride()) for each in buffers),
        )
        recording = self._recordings.get(key)
        if recording is None and key in self._recordings:
            recording = self._made(self._record, moving, buffers)
        self._recordings[key] = recording
        self._recordings.move_to_end(key)
        if len(self._recordings) > _MOST_RECORDINGS:
            self._recordings.popitem(last=False)
        return self._graph(inputs) if recording is None else recording(moving)

    def _made(
        self, record: Recorder, moving: list[Tensor], buffers: list[Tensor]
    ) -> "_Recording | None":
        try:
            return _Recording(self._graph, moving, buffers, record)
        except RuntimeError as error:
            self._record = None
            text = str(error).strip().splitlines() or [type(error).__name__]
            warnings.warn(
                f"{self._name} has no CUDA graph, so its kernels are launched one by one: "
                f"{text[0]}",
                OutriderWarning,
                stacklevel=2,
            )
            return None


class _Recording:
    """The launches of one pass, for inputs of these sizes and these very KV buffers."""

    def __init__(
        self, graph: Graph, moving: list[Tensor], buffers: list[Tensor], record: Recorder
    ) -> None:
        self._inputs = [each.clone() for each in moving]
        self._replay, self._results = record(lambda: graph([*self._inputs, *buffers]))

    def __call__(self, moving: list[Tensor]) -> list[Tensor]:
        for held, given in zip(self._inputs, moving, strict=True):
            held.copy_(given)
        self._replay()
        return [each.clone() for each in self._results]


def recorded(
    module: TreePass,
    trace: Callable[[], ExportedProgram],
    *,
    make: Maker,
    record: Recorder,
    name: str = "a model",
) -> Graph:
    """A pass's graph whose launches are recorded.

    Args:
        module: the pass.
        trace: gives its program.
        make: makes the graph itself.
        record: records launches.
        name: how messages call it.
    """
    return RecordedGraph(make(module, trace), module.num_moving, record, name)


def rounded_span(span: int, slots: int) -> int:
    """The span that a recorded pass reads: one of four sizes between powers of two, so that no pass
    reads a quarter more than it must.

    Args:
        span: the slots that it has to read.
        slots: those that its KV buffers have, at least as many.
    """
    step = max(_FIRST_SPAN, (1 << (span - 1).bit_length()) // 2) // _PER_OCTAVE
    return min(max(_FIRST_SPAN, -(-span // step) * step), slots)
