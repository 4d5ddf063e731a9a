"""The forward pass of a model: one function for every model, and for eager and compiled executors.

Legend: B rows, N query tokens, D drafted tokens, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.clock import Stopwatch
from outrider.core.health import Checked
from outrider.runtime.executors.compiled import MOST_TOKENS, CompiledExecutor
from outrider.runtime.executors.eager import EagerExecutor
from outrider.runtime.executors.fused_draft import DraftPlan
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.kv_cache.cache import KVCache
from outrider.sampling.warp import DraftParameters

_MOST_CAPTURED_TOKENS = 4096
"""Query tokens of a forward pass, over all rows, up to which CUDA graphs capture it. Each holds the
memory of its activations."""

_PRODUCTS_PER_LAYER = 2**26
"""As many multiplications take about as long as Python takes around the operations of a layer, 0.7
and 0.8 ms (AMD EPYC, 2 threads)."""


class Runnable(Checked, Protocol):
    """What the runner needs of a model (``HFModel``).

    Attributes:
        module: the loaded model.
        num_layers: its decoder layers.
        num_tokens: width of its logits.
        device: where it is.
        decoder_prompt: the tokens that every sequence begins with where an encoder reads the
            prompt; None for a decoder-only model.
        exact: whether bits may not depend on how many tokens share a forward pass.
        watch: measures the time spent in forward passes.
        compiled: the model's compiled executor, if it has one.
    """

    @property
    def module(self) -> PreTrainedModel: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def decoder_prompt(self) -> tuple[int, ...] | None: ...
    @property
    def exact(self) -> bool: ...
    @property
    def watch(self) -> Stopwatch: ...
    @property
    def compiled(self) -> CompiledExecutor | None: ...

    def eager_executor(self, batch: ForwardBatch) -> EagerExecutor:
        """The executor that runs a batch where no compiled one does."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """:func:`forward` of this model, once the cache is ready for it."""

    def without_compiled(self) -> "Runnable":
        """The same model, which runs eagerly."""


def forward(model: Runnable, batch: ForwardBatch) -> ForwardOutput:
    """One forward pass; commits nothing.

    The compiled executor runs the batch if it can, else the eager one. The health of each row's
    logits is noted in ``batch.cache.health``.

    Args:
        model: the model.
        batch: its cache is written to after the committed slots.
    """
    batch.begin()
    output = compiled = None
    if model.compiled is not None:
        num_queries = batch.tokens_BN.shape[1]
        compiled = compiled_executor(model, batch.cache, num_queries, batch.num_logits)
    with model.watch:
        if compiled is not None:
            output = compiled.forward(batch)
        if output is None:
            output = model.eager_executor(batch).forward(batch)
    batch.cache.health.add(model, output.health_B)
    return output


def fused_draft(
    model: Runnable,
    cache: KVCache,
    tokens_BN: Tensor,
    plan: DraftPlan,
    parameters: DraftParameters | None,
    u_BD: Tensor | None,
) -> tuple[Tensor, ...] | None:
    """A draft of D tokens by one compiled program; commits nothing.

    Args:
        model: the draft model.
        cache: its lengths say where the query tokens go.
        tokens_BN: the query tokens, root last, as many in each row.
        plan: the chain or tree.
        parameters: of the rows' distributions; None for greedy ones.
        u_BD: the numbers in [0, 1) to draw with; None for greedy rows.

    Returns:
        Distributions, or logits of greedy rows, (B, D + 1, V), zero for tokens without children,
        and the tokens (B, D + 1), root first; of a tree also which of them exist, (B, D + 1). None
        where there is no such program.
    """
    compiled = compiled_executor(model, cache, tokens_BN.shape[1])
    if compiled is None:
        return None
    later = plan.widths(sampled=parameters is not None)
    cache.begin(tokens_BN.shape[1] + sum(later))
    with model.watch:
        found = compiled.draft(cache, tokens_BN, plan, parameters, u_BD)
    if found is None:
        return None
    recorded_BNV, health_B, *tokens = found
    cache.health.add(model, health_B)
    return recorded_BNV, *tokens


def compiled_executor(
    model: Runnable, cache: KVCache, num_queries: int, num_logits: int = 0
) -> CompiledExecutor | None:
    """The model's compiled executor, if it is to run a forward pass over so many query tokens of
    each row, of which the last ``num_logits`` need logits (0: all).

    Compiled programs read KV buffers that hold numbers as the model computes them. In an exact
    model the number of query tokens decides nothing, since bits may not depend on it.
    """
    if model.compiled is None or not cache.is_plain:
        return None
    if model.exact:
        return model.compiled if num_logits == 0 else None
    num_tokens = cache.num_rows * num_queries
    pays = num_logits == 0 or compiled_prefill_pays(model, num_tokens)
    most = _MOST_CAPTURED_TOKENS if model.device.type == "cuda" else MOST_TOKENS
    return model.compiled if num_tokens <= most and pays else None


def compiled_prefill_pays(model: Runnable, num_tokens: int) -> bool:
    """Whether a compiled program takes less time than the eager model for so many query tokens of
    which few need logits: where it computes no others, or where computing them all costs less than
    running the layers eagerly would."""
    if model.compiled is not None and model.compiled.selects_logits:
        return True
    width: int | None = getattr(model.module.config.get_text_config(), "hidden_size", None)
    if width is None:
        return False
    return num_tokens * model.num_tokens * width <= _PRODUCTS_PER_LAYER * model.num_layers
