"""CUDA graphs: all kernels of a forward pass, a fused draft or a verification rule in one launch.

A model of 32 layers launches more than a thousand kernels in a forward pass, at 5 to 30
microseconds each, and compiled programs some hundreds. A CUDA graph captures them once, with the
addresses that they read and write, and launches them together. Inputs that differ from one forward
pass to the next (tokens, lengths, masks, random numbers) are copied to the captured addresses; KV
buffers are part of the capture; results are copied out before the next launch overwrites them.
Spans are rounded up to a few sizes, so that few captures suffice; masks hide the slots beyond a
forward pass's own span.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.export import ExportedProgram

from outrider.core.errors import OutriderWarning
from outrider.core.recording import CaptureError, capturing
from outrider.runtime.executors.compile_cache import Program
from outrider.runtime.executors.own_code import own_code
from outrider.runtime.executors.traced import TreeForward
from outrider.runtime.executors.verification_program import FusedLogitVerification

Replay = Callable[[], None]
"""Launches all captured kernels again."""

Key = tuple[tuple[object, ...], ...]
_FIRST_SPAN = 256
_PER_OCTAVE = 4
_MOST_CAPTURES = 128
"""Sizes that are remembered: batch sizes, numbers of query tokens and spans of a busy server."""

_MOST_BYTES = 2**30
"""Bytes of inputs and results that the captures of a program hold: logits above all."""


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

    ``torch.cuda.graph`` would do the same, but gives back all cached memory before each capture.
    Allocating it anew takes longer than the capture, and KV buffers would get other addresses.
    After a capture that fails, torch allows no other in the same memory: the next ones get another.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, run: Callable[[], list[Tensor]]) -> tuple[Replay, list[Tensor]]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(self._device)
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # other threads, such as a server's, may allocate meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = run()
                graph.capture_end()
            except BaseException:
                self._pool = None
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
        here.wait_stream(self._stream)
        return graph.replay, results


class GraphedProgram:
    """A program that is captured when its sizes and KV buffers occur a second time, and replayed
    from then on.

    The first time it runs as it is: some sizes occur only once, and libraries initialise
    themselves in the first run. A program that cannot be captured keeps running as it is, after one
    warning, unless it says itself that it cannot (``CaptureError``).

    Args:
        program: what is captured. The kernels it launches may depend on the sizes of its inputs,
            but not on their values.
        num_moving: how many of its first inputs have another address every time; the others are
            its KV buffers. None means all.
        record: captures launches.
        name: how messages call the model or rule.
    """

    def __init__(
        self, program: Program, num_moving: int | None, record: Recorder, name: str
    ) -> None:
        self._program = program
        self._num_moving = num_moving
        self._record: Recorder | None = record
        self._name = name
        self._captures: OrderedDict[Key, _Capture | None] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_captures(self) -> int:
        """How many captures are kept."""
        return sum(each is not None for each in self._captures.values())

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        if self._record is None:
            return self._program(inputs)
        num = len(inputs) if self._num_moving is None else self._num_moving
        moving, buffers = inputs[:num], inputs[num:]
        key = (
            *((each.shape, each.dtype) for each in moving),
            *((each.data_ptr(), each.shape, each.stride()) for each in buffers),
        )
        capture = self._captures.get(key)
        if capture is None and key in self._captures:
            capture = self._captured(self._record, moving, buffers)
        self._captures[key] = capture
        self._captures.move_to_end(key)
        while len(self._captures) > _MOST_CAPTURES or self._num_bytes > _MOST_BYTES:
            _, oldest = self._captures.popitem(last=False)
            self._num_bytes -= 0 if oldest is None else oldest.num_bytes
        return self._program(inputs) if capture is None else capture(moving)

    def _captured(
        self, record: Recorder, moving: list[Tensor], buffers: list[Tensor]
    ) -> "_Capture | None":
        """A capture of these sizes; None where there cannot be one, or where it would take much of
        the memory that all may take."""
        if sum(each.nbytes for each in moving) > _MOST_BYTES // 8:
            return None
        try:
            found = _Capture(self._program, moving, buffers, record)
            self._num_bytes += found.num_bytes
            return found
        except CaptureError:
            self._record = None
            return None
        except RuntimeError as error:
            self._warn_of(error)
            return None

    def _warn_of(self, error: RuntimeError) -> None:
        self._record = None
        text = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(
            f"{self._name} has no CUDA graph, so its kernels are launched one by one: {text[0]}",
            OutriderWarning,
            stacklevel=4,
        )


class _Capture:
    """The captured launches of one program, for inputs of fixed sizes and fixed KV buffers.

    Attributes:
        num_bytes: of the inputs and results that it holds.
    """

    def __init__(
        self, program: Program, moving: list[Tensor], buffers: list[Tensor], record: Recorder
    ) -> None:
        self._inputs = [each.clone() for each in moving]
        with capturing() as self._kept:
            self._replay, self._results = record(lambda: program([*self._inputs, *buffers]))
        self.num_bytes = sum(each.nbytes for each in (*self._inputs, *self._results))

    def __call__(self, moving: list[Tensor]) -> list[Tensor]:
        for held, given in zip(self._inputs, moving, strict=True):
            held.copy_(given)
        self._replay()
        return [each.clone() for each in self._results]


def _own_code(module: TreeForward, trace: Callable[[], ExportedProgram]) -> Program:
    return own_code(module)


def graphed(
    module: TreeForward,
    trace: Callable[[], ExportedProgram],
    *,
    record: Recorder,
    make: Callable[[TreeForward, Callable[[], ExportedProgram]], Program] = _own_code,
    name: str = "a model",
) -> Program:
    """The program of a forward pass, whose launches are captured.

    Args:
        module: the forward pass.
        trace: traces it.
        record: captures launches.
        make: compiles it; by default it runs its own code.
        name: how messages call the model.
    """
    return GraphedProgram(make(module, trace), module.num_moving, record, name)


def graphed_rule(
    module: FusedLogitVerification,
    trace: Callable[[], ExportedProgram],
    own: bool,
    *,
    record: Recorder,
) -> Program:
    """The program of a verification rule: its own code, whose launches are captured. Other
    arguments as of ``RuleCompiler``."""
    return GraphedProgram(own_code(module), None, record, type(module.verifier).__name__)


def rounded_span(span: int, slots: int) -> int:
    """The span that a captured forward pass reads: 256 slots, or one of four sizes between powers
    of two, at most a quarter more than necessary.

    Args:
        span: slots that it has to read.
        slots: slots of its KV buffers, at least as many.
    """
    step = max(_FIRST_SPAN, (1 << (span - 1).bit_length()) // 2) // _PER_OCTAVE
    return min(max(_FIRST_SPAN, -(-span // step) * step), slots)
