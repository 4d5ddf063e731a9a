"""CUDA graphs around compiled programs: all kernels of a forward pass, or of a fused draft, in one
launch.

A program compiled ahead of time still launches its kernels one by one, some hundred of them for a
model of sixteen layers, several microseconds each. A CUDA graph captures them once, with the
addresses that they read and write, and launches them together. Inputs that differ from one forward
pass to the next (tokens, lengths, masks, random numbers) are copied to the captured addresses; KV
buffers are part of the capture; results are copied out before the next launch overwrites them.
Spans are rounded up to a few sizes, so that few captures suffice; masks hide the slots beyond a
forward pass's own span.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.export import ExportedProgram

from outrider.core.errors import OutriderWarning
from outrider.runtime.executors.compile_cache import Program
from outrider.runtime.executors.compiled import Compiler
from outrider.runtime.executors.traced import TreeForward

Replay = Callable[[], None]
"""Launches all captured kernels again."""

Key = tuple[tuple[object, ...], ...]
_FIRST_SPAN = 64
_PER_OCTAVE = 4
_MOST_CAPTURES = 32


class Recorder(Protocol):
    """Captures kernel launches."""

    def __call__(self, run: Callable[[], list[Tensor]]) -> tuple[Replay, list[Tensor]]:
        """Captures the kernels that ``run`` launches.

        Returns:
            A function that launches them again, and the tensors that each launch leaves its
            results in. Capturing need not compute anything.
        """


class CudaRecorder:
    """Captures on a GPU. All captures share their memory, so the results of one last until another
    is launched.

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


class GraphedProgram:
    """A compiled program that is captured when its sizes and KV buffers occur a second time, and
    replayed from then on.

    The first time it runs as it is: some sizes occur only once, and libraries initialise
    themselves in the first run. A program that cannot be captured keeps running as it is, after one
    warning.

    Args:
        program: what is captured. The kernels it launches may depend on the sizes of its inputs,
            but not on their values.
        num_moving: how many of its first inputs have another address every time; the others are
            its KV buffers.
        record: captures launches.
        name: how messages call the model.
    """

    def __init__(self, program: Program, num_moving: int, record: Recorder, name: str) -> None:
        self._program = program
        self._num_moving = num_moving
        self._record: Recorder | None = record
        self._name = name
        self._captures: OrderedDict[Key, _Capture | None] = OrderedDict()

    @property
    def num_captures(self) -> int:
        """How many captures are kept."""
        return sum(each is not None for each in self._captures.values())

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        if self._record is None:
            return self._program(inputs)
        moving, buffers = inputs[: self._num_moving], inputs[self._num_moving :]
        key = (
            *((each.shape, each.dtype) for each in moving),
            *((each.data_ptr(), each.shape, each.stride()) for each in buffers),
        )
        capture = self._captures.get(key)
        if capture is None and key in self._captures:
            capture = self._captured(self._record, moving, buffers)
        self._captures[key] = capture
        self._captures.move_to_end(key)
        if len(self._captures) > _MOST_CAPTURES:
            self._captures.popitem(last=False)
        return self._program(inputs) if capture is None else capture(moving)

    def _captured(
        self, record: Recorder, moving: list[Tensor], buffers: list[Tensor]
    ) -> "_Capture | None":
        try:
            return _Capture(self._program, moving, buffers, record)
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


class _Capture:
    """The captured launches of one program, for inputs of fixed sizes and fixed KV buffers."""

    def __init__(
        self, program: Program, moving: list[Tensor], buffers: list[Tensor], record: Recorder
    ) -> None:
        self._inputs = [each.clone() for each in moving]
        self._replay, self._results = record(lambda: program([*self._inputs, *buffers]))

    def __call__(self, moving: list[Tensor]) -> list[Tensor]:
        for held, given in zip(self._inputs, moving, strict=True):
            held.copy_(given)
        self._replay()
        return [each.clone() for each in self._results]


def graphed(
    module: TreeForward,
    trace: Callable[[], ExportedProgram],
    *,
    make: Compiler,
    record: Recorder,
    name: str = "a model",
) -> Program:
    """The compiled program of a forward pass, whose launches are captured.

    Args:
        module: the forward pass.
        trace: traces it.
        make: compiles it.
        record: captures launches.
        name: how messages call the model.
    """
    return GraphedProgram(make(module, trace), module.num_moving, record, name)


def rounded_span(span: int, slots: int) -> int:
    """The span that a captured forward pass reads: one of four sizes between powers of two, at most
    a quarter more than necessary.

    Args:
        span: slots that it has to read.
        slots: slots of its KV buffers, at least as many.
    """
    step = max(_FIRST_SPAN, (1 << (span - 1).bit_length()) // 2) // _PER_OCTAVE
    return min(max(_FIRST_SPAN, -(-span // step) * step), slots)
