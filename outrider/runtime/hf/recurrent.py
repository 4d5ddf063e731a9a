"""Recurrent and hybrid models as targets and draft models: Mamba, Mamba-2 and their hybrids, gated
delta rule, RG-LRU, RWKV-4, xLSTM, and short convolutions.

The cache owns the states (``kv_cache/recurrent.py``); forward passes run a view of the module that
hands it each layer's recurrence (``recurrent_views.py``). From there on ``HFModel`` scores, commits
and rolls back such a model as any other, with two exceptions. It scores chains only: a state that
has read one child of a node cannot read the other. And it has no prefixes of earlier prompts: a
state stands for one length.

Legend: B rows, N query tokens, V vocabulary.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.core.capabilities import Capabilities
from outrider.core.context import Context
from outrider.core.draft import Draft, Scores
from outrider.core.errors import IncompatibleError, UnsupportedModelError
from outrider.core.lengths import Lengths
from outrider.runtime.attention_metadata import AttentionMetadata, AttentionSpec
from outrider.runtime.executors.eager import EagerExecutor
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.hf.adapter import MARGIN, HFModel
from outrider.runtime.hf.recurrent_views import XLSTMStates, running, with_recurrences
from outrider.runtime.hf.support import (
    RECURRENT,
    check_attention,
    check_head,
    declared_types,
    is_recurrent,
)
from outrider.runtime.kv_cache.cache import KVCache
from outrider.runtime.kv_cache.recurrent import RecurrentCache
from outrider.runtime.prefill import Prefill, unsampled_context

_STATELESS_CALL = frozenset({"recurrent_gemma", "rwkv"})
_SLIDING = {"sliding_attention", "hybrid_sliding"}
_FULL = {"full_attention", "hybrid"}


class RecurrentExecutor(EagerExecutor):
    """The eager executor of a recurrent model, whose layers find the cache in a context variable.

    Args:
        module: a view of the model (``recurrent_views.py``).
        family: its ``model_type``.
    """

    def __init__(
        self, module: Any, spec: AttentionSpec, num_layers: int, name: str, family: str
    ) -> None:
        super().__init__(module, spec, num_layers, name)
        self._family = family
        self._parameters = frozenset(inspect.signature(module.forward).parameters)

    def _logits(self, module: Any, batch: ForwardBatch, metadata: AttentionMetadata) -> Tensor:
        cache = batch.cache
        assert isinstance(cache, RecurrentCache)
        arguments: dict[str, Any] = {"use_cache": self._family not in _STATELESS_CALL}
        if self._family == "xlstm":
            arguments["cache_params"] = XLSTMStates(self._num_layers)
        elif "cache_params" in self._parameters:
            arguments["cache_params"] = cache
        elif "past_key_values" in self._parameters:
            arguments["past_key_values"] = cache
        if "position_ids" in self._parameters:
            arguments["position_ids"] = metadata.positions_BN
        if metadata.masks:
            arguments["attention_mask"] = dict.fromkeys(_MASKS) | dict(metadata.masks)
        if self._selects_logits:
            arguments["logits_to_keep"] = batch.num_logits
        with running(cache):
            logits_BNV: Tensor = module(input_ids=batch.tokens_BN, **arguments).logits
        return logits_BNV


_MASKS = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "full_attention")
"""Kinds of layers for which a model looks up a mask; recurrent layers get none, since no row is
padded on the left."""


class RecurrentModel(HFModel):
    """A ``core.Model`` around a recurrent or hybrid causal language model.

    Args:
        module: the model; put into evaluation mode.
        tokenizer: its tokenizer, or None for token ids only.
        name: how messages call it.

    Raises:
        UnsupportedModelError: another family, or a layer that was changed.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "model",
    ) -> None:
        super().__init__(module, tokenizer, name)
        config = module.config.get_text_config()
        self.spec = AttentionSpec(_windows(config), self.limit, self.dtype)
        view = with_recurrences(self.module, name)
        self.eager = RecurrentExecutor(view, self.spec, self.num_layers, name, config.model_type)

    def score(self, cache: KVCache, draft: Draft) -> Scores:
        """One forward pass over a chain, after the committed tokens.

        Raises:
            IncompatibleError: a tree.
        """
        if not draft.is_chain:
            raise IncompatibleError(no_trees(self, "scores"))
        num, layers = draft.tokens_BN.shape[1], self.hidden_layers
        kept = None if num > 1 else Lengths([1] * cache.num_rows, torch.ones_like(cache.length_B))
        batch = ForwardBatch(cache, draft.tokens_BN, hidden_layers=layers, kept=kept)
        output = self.forward(batch)
        return Scores(output.logits_BNV, output.hidden_BNH)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One forward pass over a batch; commits nothing."""
        if batch.nodes is not None:
            raise IncompatibleError(no_trees(self, "runs over"))
        assert isinstance(batch.cache, RecurrentCache)
        self._read_again(batch.cache)
        return super().forward(batch)

    def _read_again(self, cache: RecurrentCache) -> None:
        """Computes the states of rows that were rolled back further than the snapshots reach."""
        context = cache.context
        for row in [row for row, unread in enumerate(cache.unread) if unread]:
            length = cache.lengths[row]
            tokens = context.tokens_BT[row, :length].tolist()
            alone = unsampled_context(self, [*tokens, 0])
            view = cache.row(row, alone)
            Prefill(self, view, alone).finish()
            cache.replace(row, view)

    def _check(self, module: PreTrainedModel, name: str) -> None:
        check_recurrent_config(module.config, type(module).__name__, name)
        check_head(module, name)
        check_attention(module.config, type(module).__name__, name)

    def short_cache(self, context: Context, num_tokens: int) -> None:
        """None: states are not those of a few tokens."""

    def _cache(self, context: Context) -> RecurrentCache:
        return RecurrentCache(context, self.num_layers, self.limit + MARGIN, self.plan)


def check_recurrent_config(config: PretrainedConfig, kind: str, name: str) -> None:
    """Raises UnsupportedModelError unless the model is of a supported family."""
    if not is_recurrent(config):
        raise UnsupportedModelError(
            f"{name} ({kind}) is of type {config.get_text_config().model_type}; recurrent models "
            f"are supported of the types {', '.join(sorted(RECURRENT))}"
        )


def check_chains(models: Iterable[HFModel], able: Capabilities[HFModel], method: str) -> None:
    """Raises IncompatibleError where a method runs a recurrent model over trees.

    Args:
        models: the target, then the drafter's models.
        able: what the drafter declares.
        method: how messages call the method.
    """
    target, *own = models
    trees = [target] * able.drafts_trees + own * able.runs_trees
    for model in trees:
        if isinstance(model, RecurrentModel):
            raise IncompatibleError(
                f"method {method!r} drafts trees, but {no_trees(model, 'scores')}"
            )


def no_trees(model: HFModel, verb: str) -> str:
    """Why a recurrent model takes no trees."""
    return (
        f"{model.name} ({type(model.module).__name__}) {verb} chains only: its recurrent state "
        f"follows one sequence and cannot branch at a node; take a method that drafts chains, such "
        f"as 'speculative'"
    )


def _windows(config: Any) -> dict[str, int | None]:
    """Sliding window of each kind of attention layer; no kinds in a model without attention."""
    types = set(declared_types(config))
    kinds: dict[str, int | None] = {}
    if types & _FULL:
        kinds["full_attention"] = None
    if types & _SLIDING:
        kinds["sliding_attention"] = config.sliding_window
    return kinds
