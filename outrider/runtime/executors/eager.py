"""The eager executor: the model's own forward pass, operator by operator.

Legend: B rows, N query tokens, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from outrider.core.health import health_of
from outrider.runtime.attention_metadata import AttentionMetadata, AttentionSpec
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.hf.hidden_states import joined, recording_hidden_states, tapped
from outrider.runtime.kernels.exact import exact_mode

_AS_IT_IS = nullcontext()


class EagerExecutor:
    """An executor that runs any batch.

    Args:
        module: the model, or a view of it (``hf/views.py``).
        spec: what positions and masks depend on.
        num_layers: decoder layers of the module.
        name: how messages call the model.
        exact: whether the module computes with exact arithmetic (``kernels/exact.py``).
    """

    def __init__(
        self,
        module: nn.Module,
        spec: AttentionSpec,
        num_layers: int,
        name: str,
        *,
        exact: bool = False,
    ) -> None:
        self.module: Any = module
        self.spec = spec
        self.exact = exact
        self._num_layers = num_layers
        self._name = name
        self._selects_logits = selects_logits(module)
        self._tapped: dict[tuple[int, ...], Any] = {}

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        metadata = self.spec.metadata_of(batch.cache, batch.tokens_BN.shape[1], batch.nodes)
        if not batch.hidden_layers:
            with self.arithmetic():
                logits_BNV = self._logits(self.module, batch, metadata)
            return ForwardOutput(batch.asked(logits_BNV), health_of(logits_BNV))
        view = self.recording(batch.hidden_layers)
        with self.arithmetic(), recording_hidden_states() as recording:
            logits_BNV = self._logits(view, batch, metadata)
        hidden_BNH = joined(recording, batch.hidden_layers)
        return ForwardOutput(batch.asked(logits_BNV), health_of(logits_BNV), hidden_BNH)

    def arithmetic(self) -> AbstractContextManager[None]:
        """How the module computes within this context: exactly, or as torch does."""
        return exact_mode() if self.exact else _AS_IT_IS

    def recording(self, layers: Sequence[int]) -> Any:
        """A view of the module that records the hidden states of these layers; made once."""
        layers = tuple(layers)
        if layers not in self._tapped:
            self._tapped[layers] = tapped(
                self.module, self._stack(), self._num_layers, layers, self._name
            )
        return self._tapped[layers]

    def _stack(self) -> nn.Module:
        """The part of the module with all decoder layers and the final norm."""
        stack: nn.Module = self.module.get_decoder()
        return stack

    def _logits(self, module: Any, batch: ForwardBatch, metadata: AttentionMetadata) -> Tensor:
        """The model's own forward pass, (B, N, V): of all query tokens, or where the model can, of
        those asked for only."""
        more = {"logits_to_keep": batch.num_logits} if self._selects_logits else {}
        return decoder_logits(module, batch.tokens_BN, metadata, batch.cache, **more)


def selects_logits(module: Any) -> bool:
    """Whether a model can compute the logits of some query tokens without those of the others."""
    return "logits_to_keep" in inspect.signature(module.forward).parameters


def decoder_logits(
    module: Any, tokens_BN: Tensor, metadata: AttentionMetadata, cache: Cache, **more: Any
) -> Tensor:
    """The logits (B, N, V) of a decoder; the model writes to the cache. Compiled programs trace
    this call.

    Args:
        module: a decoder-only model, or a view of one; or the decoder of an encoder-decoder
            (``hf/seq2seq_decoder.py``).
        tokens_BN: query tokens.
        metadata: their positions and masks.
        cache: where the model writes and reads keys and values.
        more: further arguments of the model's forward method.
    """
    if metadata.slot_BS is not None:
        more["slot_positions"] = metadata.slot_BS
    logits_BNV: Tensor = module(
        input_ids=tokens_BN,
        position_ids=metadata.positions_BN,
        attention_mask=metadata.mask,
        past_key_values=cache,
        use_cache=True,
        **more,
    ).logits
    return logits_BNV
