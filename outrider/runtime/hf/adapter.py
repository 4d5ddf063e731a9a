"""Any ``transformers`` causal language model as a target or a draft, unmodified.

The only file that touches the modelling API: it gives a model explicit positions, an explicit
four-dimensional mask (one per kind of layer where there are sliding windows) and our own cache.
That is all it takes for ragged batches and token trees.

Legend: B rows, N nodes or columns of a pass, S slots, V vocabulary, H hidden width.
"""

import copy
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.core.clock import Stopwatch
from outrider.core.context import Context
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import NonFiniteLogitsError
from outrider.core.protocols import Scores
from outrider.runtime.executors.compiled import MOST_TOKENS, CompiledPass
from outrider.runtime.health import health_of
from outrider.runtime.hf.generation_config import with_demands
from outrider.runtime.hf.longrope import (
    long_rows,
    marked,
    original_length,
    refresh,
    with_factors_per_row,
)
from outrider.runtime.hf.support import check_supported, windows_of
from outrider.runtime.kernels.exact import exact_mode
from outrider.runtime.kv_cache.cache import KVCache
from outrider.runtime.kv_cache.storage import KVCachePlan, KvDtype, KVLayout, MemoryBudget
from outrider.runtime.masks import Nodes, pass_mask
from outrider.runtime.prefill import all_logits_are_cheap, prefill
from outrider.sampling import Sampling

MARGIN = 256  # slots past the limit, for a tree's nodes and those of rows that may not use them


class HFModel:
    """A ``core.Model`` around a ``transformers`` causal language model.

    Args:
        module: the model; put into evaluation mode.
        tokenizer: its tokenizer, or None for token ids only.
        name: how messages call it.

    Attributes:
        num_tokens: width of the logits.
        limit: longest context in tokens.
        watch: time spent in forward passes.
        windows: what each kind of layer sees, None for everything; each kind has a mask.
        original: longest sequence with short rotary factors (``longrope.py``); None where all have
            the same.
        runs: what computes a forward pass: the module, or a copy that shares its weights.
        plan: how its caches store keys and values, and how much they may.
        compiled: its compiled pass, if it has one (``runtime.py``).
        layout: the shapes of its KV buffers, if somebody asked for them (``prefill.py``).
        exact: whether bits may not depend on a pass's width, so that all rounds run the same code.
        opening: the tokens every text begins with, where the prompt is a source that an encoder
            reads; None where the text begins with the prompt.

    Raises:
        UnsupportedModelError: an encoder-decoder, layers whose state cannot be rolled back, or a
            model that takes no explicit positions.
    """

    decoder_prompt: tuple[int, ...] | None = None
    compiled: CompiledPass | None = None
    layout: KVLayout | None = None
    exact: bool = False

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "model",
    ) -> None:
        self._check(module, name)
        self.module = module.eval()
        self.tokenizer = tokenizer
        self.name = name
        config = module.config.get_text_config()
        self.limit: int = getattr(config, "max_position_embeddings", None) or 2**30
        self.num_layers: int = config.num_hidden_layers
        self.num_tokens: int = config.vocab_size
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.watch = Stopwatch(self.device)
        self.plan = KVCachePlan()
        self.windows = windows_of(config)
        self.original = original_length(config)
        self.runs = module
        if self.original is not None:
            self.runs = with_factors_per_row(module, self.original, name)
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    @property
    def prompt_limit(self) -> int:
        """Longest prompt in tokens."""
        return self.limit - 1

    def with_kv_dtype(
        self, kv_dtype: KvDtype, memory_budget: MemoryBudget | None = None
    ) -> "HFModel":
        """The same module with other caches and a clock of its own.

        Args:
            kv_dtype: how they store numbers; ``auto`` as they do now.
            memory budget: what they may take, with others that share it.
        """
        if kv_dtype == "auto":
            kv_dtype = self.plan.kv_dtype
        plan = KVCachePlan(kv_dtype, memory_budget)
        if plan == self.plan:
            return self
        twin = copy.copy(self)
        twin.plan, twin.watch = plan, Stopwatch(self.device)
        return twin

    def with_demands(self, sampling: Sampling, prompt: Sequence[int], room: int) -> Sampling:
        """What a request asks for, and what the model's generation config asks of every text.

        Args:
            sampling: the request's parameters, defaults filled in.
            prompt: its prompt or source.
            room: tokens the context has room for.
        """
        if self.generation_config is None:
            return sampling
        num_first = len(self.decoder_prompt or prompt)
        return with_demands(sampling, self.generation_config, prompt, num_first, room, self.device)

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The model's settings for ``generate``, if it has any."""
        return getattr(self.module, "generation_config", None)

    def logits_behind(self, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
        """Logits behind a text and its prompt, by one plain pass without any cache, (V,)."""
        ids_1T = torch.tensor([[*prompt, *text]], device=self.device)
        with self.arithmetic():
            logits_1TV: Tensor = self.module(input_ids=ids_1T, use_cache=False).logits
        return logits_1TV[0, -1]

    def start(self, context: Context) -> KVCache:
        """Caches all tokens of the context but the last, in passes of bounded width. What was not
        finite in them makes the logits of later passes so, which are checked."""
        cache = self._cache(context)
        cache.long = long_rows(context, self.original)
        prefill(self, cache, context)
        cache.health = context.health
        return cache

    def draft_room(self, length: int) -> int:
        """Most tokens of a draft that one forward pass can verify behind so many committed ones."""
        if self.original is None or length > self.original:
            return self.limit
        return self.original - length

    def score(self, cache: KVCache, draft: Draft) -> Scores:
        """One pass over all nodes of the draft, behind the committed tokens."""
        cache.lengths = [length - 1 for length in cache.context.lengths]
        if draft.is_chain:
            return Scores(self.extend(cache, draft.tokens_BN))
        query_tokens = draft.query_tokens
        tokens_BQ = draft.tokens_BN.gather(1, query_tokens.node_BQ)
        nodes = Nodes(query_tokens.ancestors_BQQ, query_tokens.depth_BQ)
        return Scores(query_tokens.to_nodes(self.extend(cache, tokens_BQ, nodes)))

    def commit(self, cache: KVCache, draft: Draft, verdict: Verdict) -> None:
        """Keeps the root and the accepted path."""
        cache.commit_path(draft, verdict)

    def join(self, cache: KVCache, other: KVCache) -> None:
        """Appends the rows of another cache."""
        cache.join(other)

    def graph_of(
        self, cache: KVCache, num_columns: int, num_logits: int = 0
    ) -> CompiledPass | None:
        """The compiled pass, where there is one for such a pass; it gives all logits, whether asked
        for or not. In an exact model the number of columns decides nothing."""
        num_tokens = cache.num_rows * num_columns
        if self.exact:
            fits = num_logits == 0
        else:
            cheap = num_logits == 0 or all_logits_are_cheap(self, num_tokens)
            fits = num_tokens <= MOST_TOKENS and cheap
        return self.compiled if fits and cache.is_plain else None

    def extend(
        self,
        cache: KVCache,
        tokens_BN: Tensor,
        nodes: Nodes | None = None,
        num_logits: int = 0,
    ) -> Tensor:
        """One forward pass over columns that follow the committed slots; commits nothing.

        Args:
            cache: its ``lengths`` and ``length_B`` say where the columns go.
            tokens_BN: the tokens.
            nodes: their topology, and the nodes that earlier passes wrote; None when each column
                follows the one before.
            num_logits: compute logits of the last so many columns only; 0 for all.

        Returns:
            Logits (B, N, V), in the model's dtype.
        """
        refresh(self, cache)
        graph = self.graph_of(cache, tokens_BN.shape[1], num_logits)
        cache.begin(tokens_BN.shape[1], nodes.first if nodes is not None else 0)
        if graph is not None and not cache.make_room():
            graph = None
        done: Sequence[Tensor] | None = None
        if graph is not None and nodes is None and self.original is None:
            with self.watch:
                done = graph.chain(cache, tokens_BN)
            graph = None
        if done is None:
            done = self._placed(cache, tokens_BN, nodes, graph, num_logits)
        logits_BNV, sum_B = done
        cache.health.add(self, sum_B)
        return logits_BNV[:, -num_logits:] if num_logits else logits_BNV

    def draft(
        self,
        cache: KVCache,
        tokens_BN: Tensor,
        depth: int,
        temperature_B: Tensor | None,
        u_BD: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """A whole draft of ``depth`` (D) tokens by one graph; commits nothing.

        Args:
            cache: its ``lengths`` and ``length_B`` say where the columns go.
            tokens_BN: the tokens that it lacks, as many in each row.
            temperature_B: of the rows; None for greedy ones.
            u_BD: the numbers in [0, 1) to draw with; None for greedy ones.

        Returns:
            Distributions, or logits of greedy rows (B, D + 1, V), zero at the last place, and the
            chain (B, D + 1), root first; None where there is no such graph.
        """
        graph = self.graph_of(cache, tokens_BN.shape[1])
        if graph is None or self.original is not None:
            return None
        cache.begin(tokens_BN.shape[1] + depth - 1)
        if not cache.make_room():
            return None
        with self.watch:
            done = graph.draft(cache, tokens_BN, depth, temperature_B, u_BD)
        if done is None:
            return None
        probs_BNV, sum_B, tokens_BN = done
        cache.health.add(self, sum_B)
        return probs_BNV, tokens_BN

    def _placed(
        self,
        cache: KVCache,
        tokens_BN: Tensor,
        nodes: Nodes | None,
        graph: CompiledPass | None,
        num_logits: int,
    ) -> Sequence[Tensor]:
        """A pass with masks and places of its own: logits, and their health per row."""
        first = nodes.first if nodes is not None else 0
        columns_N = torch.arange(first, first + tokens_BN.shape[1], device=tokens_BN.device)
        slots_BN = cache.length_B[:, None] + columns_N
        positions_BN = slots_BN
        if nodes is not None:
            positions_BN = cache.length_B[:, None] + nodes.depth_BM[:, first:]
        masks = {
            kind: pass_mask(positions_BN, nodes, cache, self.dtype, window)
            for kind, window in self.windows.items()
        }
        positions_BN = positions_BN.clamp(max=self.limit - 1)
        if self.original is not None:
            positions_BN = marked(positions_BN, cache.long, self.original)
        with self.watch:
            if graph is not None:
                done = graph.tree(cache, tokens_BN, positions_BN, slots_BN, list(masks.values()))
                if done is not None:
                    return done
            logits_BNV = self._forward(cache, tokens_BN, positions_BN, masks, nodes, num_logits)
        return logits_BNV, health_of(logits_BNV)

    def non_finite(self, position: int) -> NonFiniteLogitsError:
        """The error for a row whose sum is not finite; ``position`` is where its round began."""
        dtype = str(self.dtype).removeprefix("torch.")
        wider = {"float16": "dtype='bfloat16' or dtype='float32'", "bfloat16": "dtype='float32'"}
        remedy = f"{dtype} is wide enough: check its files, or get them again"
        if dtype in wider:
            remedy = f"or {dtype} is too narrow for it: try {wider[dtype]}"
        return NonFiniteLogitsError(
            f"{self.name} produced NaN or infinite logits at or just after position {position}; "
            f"its weights may be damaged, {remedy}"
        )

    def arithmetic(self) -> AbstractContextManager[None]:
        """How the module computes within this context: exactly, or as it is."""
        return exact_mode() if self.exact else nullcontext()

    def _check(self, module: PreTrainedModel, name: str) -> None:
        check_supported(module, name)

    def _cache(self, context: Context) -> KVCache:
        """An empty cache for a batch."""
        return KVCache(context, self.num_layers, self.limit + MARGIN, self.plan)

    def _called(self, cache: KVCache) -> Any:
        """What a pass over a cache calls: the module, or a view of it (``views.py``)."""
        return self.runs

    def _forward(
        self,
        cache: KVCache,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        masks: dict[str, Tensor],
        nodes: Nodes | None,
        num_logits: int,
    ) -> Tensor:
        """The model's own forward pass: logits (B, N, V)."""
        arguments: dict[str, Any] = {"logits_to_keep": num_logits} if self._keeps_logits else {}
        with self.arithmetic():
            logits_BNV: Tensor = self._called(cache)(
                input_ids=tokens_BN,
                position_ids=positions_BN,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                past_key_values=cache,
                use_cache=True,
                **arguments,
            ).logits
        return logits_BNV
