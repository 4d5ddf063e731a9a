"""How much memory a model's KV buffers take per token, and its recurrent states per row: measured
on a cache that holds one token, so that the numbers are exact for any family of models."""

from dataclasses import dataclass

import torch

from outrider.runtime.hf.adapter import HFModel
from outrider.runtime.kv_cache.cache import KVCache
from outrider.runtime.kv_cache.cross_attention import Seq2SeqCache
from outrider.runtime.kv_cache.recurrent import RecurrentCache


@dataclass(frozen=True)
class Footprint:
    """Bytes of what a model remembers.

    Attributes:
        slot: bytes of KV buffers per row and token of the sequence.
        source: bytes of KV buffers per row and token of the source, where an encoder reads one.
        plane: the part of ``slot`` that the largest single tensor takes.
        row: bytes of recurrent states per row, with their snapshots and the inputs that are
            recorded for a replay.
    """

    slot: int
    source: int
    plane: int
    row: int = 0

    @classmethod
    def of(cls, model: HFModel, nodes: int = 0, passes: int = 1) -> "Footprint":
        """The footprint of a model under its present plan.

        Args:
            model: the model.
            nodes: most tokens that it runs over before it is known which are kept.
            passes: in how many forward passes.
        """
        cache = model.example_cache()
        planes = [buffer[0, :, 0].nbytes for buffer in cache._buffers()]
        cross = cache.cross._buffers() if isinstance(cache, Seq2SeqCache) else []
        source = sum(buffer[0, :, 0].nbytes for buffer in cross)
        state, inputs = _recurrent_bytes(model, cache)
        row = state * (1 + passes) + inputs * nodes
        return cls(sum(planes), source, max(planes, default=0), row)

    def bytes(self, rows: int, slots: int, source: int = 0) -> int:
        """Bytes of so many rows, with so many slots per sequence and slots per source."""
        return rows * (self.slot * slots + self.source * source + self.row)


@torch.inference_mode()
def _recurrent_bytes(model: HFModel, cache: KVCache) -> tuple[int, int]:
    """Bytes of the states of one row, and of the inputs of one token."""
    if not isinstance(cache, RecurrentCache):
        return 0, 0
    model.extend(cache, torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    return cache.pass_bytes()
