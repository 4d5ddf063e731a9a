"""A draft model that only rank 0 has: the others get its logits.

All ranks keep the draft model's sequences, and draw and verify drafts by themselves, so every
method that drafts with a model works as on one process. What is saved is the memory of its weights
and KV buffers on the other ranks, and their time; what it costs is to send B · N · V logits per
forward pass.

Legend: B rows, N query tokens, V vocabulary.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.cluster.sharded.ranks import Ranks
from outrider.core.errors import IncompatibleError
from outrider.core.health import health_of
from outrider.runtime import HFModel
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.hf.sharded import out_of_step


class RankZeroModel(HFModel):
    """A model of rank 0 on any rank.

    Args:
        ranks: the processes.
        module: the model; on other ranks than 0 without weights, on the meta device.
        tokenizer: its tokenizer.
        name: how messages call it.
    """

    def __init__(self, ranks: Ranks, module: PreTrainedModel, tokenizer: Any, name: str) -> None:
        super().__init__(module, tokenizer, name)
        self._ranks = ranks
        if not ranks.leads:
            self.device = ranks.device

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Rank 0 runs the forward pass and sends the logits.

        Raises:
            IncompatibleError: hidden states are wanted.
            RankLostError: the exchange failed, or this rank failed where the others go on.
        """
        if batch.hidden_layers:
            raise IncompatibleError(
                f"{self.name} is on rank 0, and its hidden states are not sent: take "
                f"draft_placement='replicated'"
            )
        try:
            return self._lead(batch) if self._ranks.leads else self._follow(batch)
        except Exception as error:
            raise out_of_step(error, self.name) from error

    def _lead(self, batch: ForwardBatch) -> ForwardOutput:
        output = super().forward(batch)
        self._ranks.broadcast(output.logits_BNV.contiguous())
        return output

    def _follow(self, batch: ForwardBatch) -> ForwardOutput:
        batch.begin()
        num_rows, num_queries = batch.tokens_BN.shape
        shape = num_rows, batch.num_logits or num_queries, self.num_tokens
        logits_BNV = torch.empty(shape, dtype=self.dtype, device=self.device)
        with self.watch:
            self._ranks.broadcast(logits_BNV)
        health_B = health_of(logits_BNV)
        batch.cache.health.add(self, health_B)
        return ForwardOutput(logits_BNV, health_B)
