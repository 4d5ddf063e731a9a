"""A model whose layers are split among processes: tensor parallelism.

``transformers`` shards the weights by the model's own plan and exchanges partial sums within the
forward pass, so every process must run the same forward passes in the same order. Each process
holds the KV buffers of its own heads.

Legend: B rows, N tokens, H hidden width.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import IncompatibleError, OutriderError, RankLostError
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.hf.adapter import HFModel


class ShardedModel(HFModel):
    """An :class:`HFModel` of which each process has a part."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One forward pass, which all processes run together.

        Raises:
            RankLostError: the exchange with another process failed, or this process failed where
                the others go on. Either way the processes are out of step for good.
        """
        try:
            return super().forward(batch)
        except Exception as error:
            raise out_of_step(error, self.name) from error

    def with_own_weights(self) -> HFModel:
        """Not available: raises IncompatibleError."""
        raise self._apart("its weights cannot be copied")

    def logits_after(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """Not available: raises IncompatibleError."""
        raise self._apart("its forward passes run within a round only")

    def logits_within(self, prompt: Sequence[int]) -> Iterator[Tensor]:
        """Not available: raises IncompatibleError."""
        raise self._apart("its forward passes run within a round only")

    def _apart(self, why: str) -> IncompatibleError:
        return IncompatibleError(
            f"{self.name} is sharded, and {why}: load it on one process for that"
        )


def out_of_step(error: Exception, what: str) -> RankLostError:
    """The error for an exception that processes which work together cannot recover from."""
    if isinstance(error, RankLostError):
        return error
    text = str(error).strip() or type(error).__name__
    kind = "" if isinstance(error, OutriderError) else f"{type(error).__name__}: "
    return RankLostError(f"{what} cannot go on: {kind}{text.splitlines()[0]}")


def embeddings_of(embedding: nn.Module, tokens_BN: Tensor) -> Tensor:
    """The rows of a model's embedding matrix, (B, N, H), without the factor that some models apply.
    The matrix may be split among processes, which then run this together."""
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    if not hasattr(weight, "to_local"):
        return functional.embedding(tokens_BN, weight)
    rows_BNH: Tensor = embedding(tokens_BN)
    factor = getattr(embedding, "embed_scale", None)
    return rows_BNH if factor is None else rows_BNH / factor
