"""Counts the bytes that forward passes read and the operations that they compute.

Bytes are those of ``lab/profile/floor.py``: weights as stored, and keys and values. Operations are
two per weight of a matrix product and token, of experts those that a token uses; the head's for
positions with logits; and four per head channel, token and token that it attends to.

Counted are the passes of the target and of draft models, prefill included. The networks of heads
(EAGLE, Medusa and their like) are not models of their own and are not counted; nor is drawing,
verification, and the rest of a round.

Legend: B rows, N query tokens of a pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from outrider.lab.profile.floor import (
    EXPERTS,
    attention_windows,
    cache_bytes,
    decoder_layers,
    expert_share,
    weight_bytes,
)
from outrider.runtime import HFModel, KVCache, runner
from outrider.runtime.executors.fused_draft import DraftPlan
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.hf.early_exit import EarlyExit
from outrider.sampling.warp import DraftParameters


@dataclass(frozen=True)
class Work:
    """What forward passes did.

    Attributes:
        passes: how many.
        num_bytes: that they read.
        operations: that they computed.
    """

    passes: int = 0
    num_bytes: float = 0.0
    operations: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.passes + other.passes,
            self.num_bytes + other.num_bytes,
            self.operations + other.operations,
        )


class PassCounter:
    """Counts the passes of all models while :meth:`counting`."""

    def __init__(self) -> None:
        self._costs: dict[int, ModelCosts] = {}
        self._counted: dict[tuple[int, int, int, int], list[int]] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts within this context every pass that the runner runs, of any engine of this
        process."""
        forward, fused_draft = runner.forward, runner.fused_draft

        def counted_forward(model: Any, batch: ForwardBatch) -> ForwardOutput:
            lengths = sum(batch.cache.lengths)
            output = forward(model, batch)
            B, N = batch.tokens_BN.shape
            self._add(model, batch.cache, B, N, batch.num_logits or N, lengths)
            return output

        def counted_draft(
            model: Any,
            cache: KVCache,
            tokens_BN: Tensor,
            plan: DraftPlan,
            parameters: DraftParameters | None,
            u_BD: Tensor | None,
        ) -> tuple[Tensor, ...] | None:
            lengths = sum(cache.lengths)
            found = fused_draft(model, cache, tokens_BN, plan, parameters, u_BD)
            if found is not None:
                B, N = tokens_BN.shape
                self._add(model, cache, B, N, 1, lengths)
                for width in plan.widths(sampled=parameters is not None):
                    lengths += B * N
                    N = width
                    self._add(model, cache, B, N, N, lengths)
            return found

        runner.forward, runner.fused_draft = counted_forward, counted_draft
        try:
            yield
        finally:
            runner.forward, runner.fused_draft = forward, fused_draft

    def work(self) -> dict[str, Work]:
        """What was counted, by the name of the model; forgets it."""
        found: dict[str, Work] = {}
        for (key, B, N, num_logits), (passes, lengths) in self._counted.items():
            costs = self._costs[key]
            work = costs.work(B, N, num_logits, passes, lengths)
            found[costs.model.name] = found.get(costs.model.name, Work()) + work
        self._counted = {}
        return found

    def _add(
        self, model: Any, cache: KVCache, B: int, N: int, num_logits: int, lengths: int
    ) -> None:
        if not isinstance(model, HFModel):
            return
        key = id(model)
        if key not in self._costs:
            self._costs[key] = ModelCosts(model, cache)
        entry = self._counted.setdefault((key, B, N, num_logits), [0, 0])
        entry[0] += 1
        entry[1] += lengths


class ModelCosts:
    """Bytes and operations of a model's passes.

    Args:
        model: the model; kept, so that its number stays its own.
        cache: one of its caches, after a pass.
    """

    def __init__(self, model: HFModel, cache: KVCache) -> None:
        self.model = model
        layers = decoder_layers(model)
        first = layers[: model.k] if isinstance(model, EarlyExit) else []
        self._left_out = [*layers[model.num_layers :], *first]
        self._source_bytes = cache_bytes(model, cache, 0)
        self._windows = attention_windows(model, model.num_layers)
        per_slot = cache_bytes(model, cache, 1) - self._source_bytes
        self._slot_bytes = per_slot / max(1, len(self._windows))
        self._body, self._head = products(model.module, self._left_out)
        config: Any = model.module.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0) or 0
        width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
        self._channels = heads * width
        self._weight_bytes: dict[int, int] = {}

    def work(self, B: int, N: int, num_logits: int, passes: int, lengths: int) -> Work:
        """Of passes over N tokens of B rows, whose contexts have ``lengths`` tokens in all."""
        tokens = B * N
        if tokens not in self._weight_bytes:
            self._weight_bytes[tokens] = weight_bytes(self.model.module, tokens, self._left_out)
        weights = self._weight_bytes[tokens]
        cached = lengths / (passes * B)
        read = sum(min(cached + N, window) for window in self._windows)
        attended = sum(min(cached + (N + 1) / 2, window) for window in self._windows)
        num_bytes = weights + B * read * self._slot_bytes + self._source_bytes
        operations = (
            2 * self._body * tokens
            + 2 * self._head * B * num_logits
            + 4 * self._channels * attended * tokens
        )
        return Work(passes, passes * num_bytes, passes * operations)


def products(module: nn.Module, left_out: list[nn.Module]) -> tuple[float, float]:
    """Weights that multiply each token, without the head; and those of the head."""
    skipped = {part for root in left_out for part in root.modules()}
    head: Any = getattr(module, "get_output_embeddings", lambda: None)()
    share = expert_share(module, 1)
    body = 0.0
    for name, holder in module.named_modules():
        if holder in skipped or holder is head or isinstance(holder, nn.Embedding):
            continue
        used = share if EXPERTS.search(name) else 1.0
        matrices = (each for each in holder.parameters(recurse=False) if each.ndim > 1)
        body += used * sum(each.numel() for each in matrices)
    return body, 0.0 if head is None else float(head.weight.numel())
