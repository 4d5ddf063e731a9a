"""Compiled executors of a model that exits early: its first layers, and the others, which go on
from the hidden states at the exit (``hf/early_exit.py``).

Legend: B rows, N query tokens, H hidden width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.eager import EagerExecutor
from outrider.runtime.executors.traced import HeadlessForward, ResumedForward
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.kv_cache.cache import KVCache


class FirstLayersExecutor(CompiledExecutor):
    """An executor of the first layers, with a program of its own for batches that need no logits.

    Args:
        whole: the executor of the whole model, whose compiler it takes.
        first: the eager executor of the first layers.
        headless: the same without the head.
        name: how messages call the layers.
        layers: the last of them, whose hidden states batches without logits ask for.
    """

    def __init__(
        self,
        whole: CompiledExecutor,
        first: EagerExecutor,
        headless: EagerExecutor,
        name: str,
        layers: tuple[int],
    ) -> None:
        super().__init__(
            first.module,
            first.spec,
            name,
            whole.make,
            whole.read,
            first.exact,
            recording=first.recording,
            check=whole.check,
        )
        self._headless = HeadlessForward(headless.recording(layers), first.spec, layers)
        (self._num_layers,) = layers

    def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
        headless = not batch.needs_logits and batch.hidden_layers == self._headless.hidden_layers
        if not headless or batch.nodes is not None:
            return super().forward(batch)
        if not batch.cache.make_room():
            return None
        found = self._run(self._headless, batch.cache, self._chain_inputs(batch))
        if found is None:
            return None
        hidden_BNH, health_B = found
        return ForwardOutput(torch.zeros_like(hidden_BNH[..., :1]), health_B, hidden_BNH)

    def _buffers(self, cache: KVCache) -> Sequence[Tensor]:
        """Those of the first layers; the cache may be the whole model's."""
        in_use = cache.in_use()
        half = len(in_use) // 2
        return [*in_use[: self._num_layers], *in_use[half : half + self._num_layers]]


class ResumingExecutor(CompiledExecutor):
    """An executor of the whole model, and of its other layers where a cache resumes.

    Args:
        whole: the executor of the whole model, whose compiler it takes.
        eager: the eager executor of the whole model.
        rest: that of the layers after the exit.
    """

    def __init__(self, whole: CompiledExecutor, eager: EagerExecutor, rest: EagerExecutor) -> None:
        super().__init__(
            eager.module,
            eager.spec,
            whole.name,
            whole.make,
            whole.read,
            eager.exact,
            recording=eager.recording,
            check=whole.check,
        )
        self._rest = ResumedForward(rest.module, rest.spec)

    def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
        resume_BNH: Tensor | None = getattr(batch.cache, "resume_BNH", None)
        if resume_BNH is None:
            return super().forward(batch)
        if batch.nodes is not None or batch.hidden_layers or not batch.cache.make_room():
            return None
        inputs = self._chain_inputs(batch)
        found = self._run(self._rest, batch.cache, lambda: (*inputs(), resume_BNH))
        return None if found is None else ForwardOutput(batch.asked(found[0]), found[1])
