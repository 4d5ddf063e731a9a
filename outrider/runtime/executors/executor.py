"""The interface of everything that runs forward passes."""

from typing import Protocol

from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput


class Executor(Protocol):
    """Runs the forward passes of one model. All executors of a model agree up to rounding."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
        """Runs a batch whose forward pass has begun (``ForwardBatch.begin``), and writes its keys
        and values. None, and nothing is done, where this executor cannot run the batch."""
