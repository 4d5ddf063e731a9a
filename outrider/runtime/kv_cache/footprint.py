"""What a model's KV buffers take, learned from a pass over one token: exact for any family of
models."""

from dataclasses import dataclass

from outrider.runtime.hf.adapter import HFModel
from outrider.runtime.kv_cache.cross_attention import Seq2SeqCache


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model's KV buffers.

    Attributes:
        slot: per row and token of the text.
        source: per row and token of the source, where an encoder reads one.
        plane: of ``slot``, those of the largest single tensor.
    """

    slot: int
    source: int
    plane: int

    @classmethod
    def of(cls, model: HFModel) -> "Footprint":
        """That of a model, with the plan that it has now."""
        cache = model.example_cache()
        planes = [buffer[0, :, 0].nbytes for buffer in cache._buffers()]
        cross = cache.cross._buffers() if isinstance(cache, Seq2SeqCache) else []
        return cls(sum(planes), sum(buffer[0, :, 0].nbytes for buffer in cross), max(planes))

    def bytes(self, rows: int, slots: int, source: int = 0) -> int:
        """Of KV buffers with so many rows, slots of the text and slots of the source."""
        return rows * (self.slot * slots + self.source * source)
