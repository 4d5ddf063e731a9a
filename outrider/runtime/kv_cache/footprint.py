"""How much memory a model's KV buffers take per token: measured on a cache that holds one token, so
that the number is exact for any family of models."""

from dataclasses import dataclass

from outrider.runtime.hf.adapter import HFModel
from outrider.runtime.kv_cache.cross_attention import Seq2SeqCache


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model's KV buffers.

    Attributes:
        slot: bytes per row and token of the sequence.
        source: bytes per row and token of the source, where an encoder reads one.
        plane: the part of ``slot`` that the largest single tensor takes.
    """

    slot: int
    source: int
    plane: int

    @classmethod
    def of(cls, model: HFModel) -> "Footprint":
        """The footprint of a model under its present plan."""
        cache = model.example_cache()
        planes = [buffer[0, :, 0].nbytes for buffer in cache._buffers()]
        cross = cache.cross._buffers() if isinstance(cache, Seq2SeqCache) else []
        return cls(sum(planes), sum(buffer[0, :, 0].nbytes for buffer in cross), max(planes))

    def bytes(self, rows: int, slots: int, source: int = 0) -> int:
        """Bytes of KV buffers with so many rows, slots per sequence and slots per source."""
        return rows * (self.slot * slots + self.source * source)
