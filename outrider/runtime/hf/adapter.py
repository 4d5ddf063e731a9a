"""Any ``transformers`` causal language model as a target or a draft model, unmodified.

``HFModel`` owns the KV cache of a batch, and says where a model's forward passes write and what
their results mean. Positions and masks are computed in ``attention_metadata.py``, forward passes
are run by ``runner.py``.

Legend: B rows, N query tokens, V vocabulary, H hidden width.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.core.clock import Stopwatch
from outrider.core.context import Context
from outrider.core.draft import Acceptance, Draft, Scores
from outrider.core.errors import InvalidParameterError, NonFiniteLogitsError
from outrider.core.lengths import Lengths
from outrider.core.protocols import ReadHidden
from outrider.core.round import keep_accepted
from outrider.runtime import runner
from outrider.runtime.attention_metadata import AttentionSpec, Nodes
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.coupled_draft import CoupledPlan
from outrider.runtime.executors.eager import EagerExecutor
from outrider.runtime.executors.fused_draft import ChainPlan, DraftPlan
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.hf.generation_config import with_demands
from outrider.runtime.hf.longrope import long_rows, original_length, with_factors_per_row
from outrider.runtime.hf.support import check_supported, windows_of
from outrider.runtime.kv_cache.cache import KVCache
from outrider.runtime.kv_cache.prefix import ModelPrefixes
from outrider.runtime.kv_cache.storage import KVCachePlan, KvDtype, KVLayout, MemoryBudget
from outrider.runtime.prefill import PREFILL_WIDTH, Prefill, recompute_long_rows, unsampled_context
from outrider.sampling import Sampling
from outrider.sampling.warp import DraftParameters

MARGIN = 256  # slots past the limit, for a tree's nodes and those of rows that may not use them
_LITTLE = 2**24  # bytes; asking how much is free takes as long as the pass of a short cache


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
        spec: what positions and masks depend on.
        eager: the executor that runs any batch.
        compiled: the executor that runs compiled programs, if the model has one
            (``executors/prepare.py``).
        plan: how the model's caches store keys and values, and how much memory they may take.
        layout: the shapes of its KV buffers, once a compiled prefill has needed them.
        prefixes: the keys and values of earlier sequences that its prefills begin with
            (``kv_cache/prefix.py``); None where each prompt is read from its first token on.
        hidden_layers: the layers whose hidden states ``score`` returns; see
            :meth:`with_hidden_states`.
        decoder_prompt: the tokens that every sequence begins with, where an encoder reads the
            prompt; None where a sequence begins with the prompt.

    Raises:
        UnsupportedModelError: an encoder-decoder, layers whose state cannot be rolled back, or a
            model that takes no explicit positions.
    """

    decoder_prompt: tuple[int, ...] | None = None
    compiled: CompiledExecutor | None = None
    layout: KVLayout | None = None
    prefixes: ModelPrefixes | None = None
    hidden_layers: tuple[int, ...] = ()

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
        original = original_length(config)
        self.spec = AttentionSpec(windows_of(config), self.limit, self.dtype, original)
        view = module if original is None else with_factors_per_row(module, original, name)
        self.eager = EagerExecutor(view, self.spec, self.num_layers, name)

    @property
    def original(self) -> int | None:
        """Longest sequence with short rotary factors (``longrope.py``); None where all sequences
        have the same factors."""
        return self.spec.original

    @property
    def exact(self) -> bool:
        """Whether bits may not depend on how many tokens share a forward pass, so that all rounds
        run the same code. A property of the module, shared by all roles that it plays."""
        return self.eager.exact

    @exact.setter
    def exact(self, value: bool) -> None:
        self.eager.exact = value

    @property
    def prompt_limit(self) -> int:
        """Longest prompt in tokens."""
        return self.limit - 1

    def in_role(self, name: str) -> "HFModel":
        """The same model in a second role: the same weights and executors, with a clock and a
        health check of its own.

        Args:
            name: how messages call it in that role.
        """
        twin = copy.copy(self)
        twin.name, twin.watch = name, Stopwatch(self.device)
        return twin

    def with_own_weights(self) -> "HFModel":
        """A copy of the model whose weights nobody else reads, so that they may change. It runs as
        this model does; its programs are loaded from the compile cache, or compiled, when they are
        first needed."""
        module = copy.deepcopy(self.module)
        twin = type(self)(module, self.tokenizer, self.name)
        twin.plan, twin.layout, twin.exact = self.plan, self.layout, self.exact
        if self.compiled is not None:
            twin.compiled = self.compiled.of_copy(twin.eager.module, twin.eager.recording)
        return twin

    def with_kv_dtype(
        self, kv_dtype: KvDtype, memory_budget: MemoryBudget | None = None
    ) -> "HFModel":
        """The same model with other caches and a clock of its own.

        Args:
            kv_dtype: how the caches store numbers; ``auto`` as they do now. For a model that
                computes in bfloat16, ``bfloat16`` is its own precision: plain buffers.
            memory_budget: what the caches may take, with others that share it.
        """
        if kv_dtype == "auto":
            kv_dtype = self.plan.kv_dtype
        elif kv_dtype == "bfloat16" and self.dtype == torch.bfloat16:
            kv_dtype = "auto"
        pool = self.plan.pool if memory_budget is None else None  # its buffers are not counted
        plan = KVCachePlan(kv_dtype, memory_budget, pool)
        if plan == self.plan:
            return self
        twin = self.in_role(self.name)
        twin.plan = plan
        return twin

    def with_hidden_states(self, layers: Sequence[int]) -> "HFModel":
        """The same model, whose ``score`` returns hidden states in ``Scores.hidden_BNH``.

        Args:
            layers: which, numbered as in ``ForwardBatch.hidden_layers``: l for the output of the
                first l layers, and the number of layers for the output of the final norm. Several
                are returned side by side, in this order.

        Raises:
            InvalidParameterError: a layer that the model does not have.
            UnsupportedModelError: a model whose layers are out of reach.
        """
        for layer in layers:
            if not 1 <= layer <= self.num_layers:
                raise InvalidParameterError(
                    f"hidden states of layer {layer}: {self.name} has layers 1 to {self.num_layers}"
                )
        twin = self.in_role(self.name)
        twin.hidden_layers = tuple(layers)
        self.eager.recording(twin.hidden_layers)  # so that it is refused here, if at all
        return twin

    def without_compiled(self) -> "HFModel":
        """The same model in the same role, which runs eagerly."""
        twin = copy.copy(self)
        twin.compiled = None
        return twin

    def with_demands(self, sampling: Sampling, prompt: Sequence[int], room: int) -> Sampling:
        """A request's parameters together with what the model's generation config asks of every
        sequence.

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

    def logits_after(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """Logits after a prompt and a continuation, by one plain forward pass without any cache,
        (V,)."""
        ids_1T = torch.tensor([[*prompt, *output]], device=self.device)
        with self.arithmetic():
            logits_1TV: Tensor = self.module(input_ids=ids_1T, use_cache=False).logits
        return logits_1TV[0, -1]

    def logits_within(self, prompt: Sequence[int]) -> Iterator[Tensor]:
        """The logits after each token of a prompt, (N, V) for the next N tokens at a time, in
        forward passes of bounded width. The prefix cache is neither read nor written."""
        model = self.without_compiled()
        context = unsampled_context(model, list(prompt))
        cache = self._cache(context)
        if self.original is not None:
            cache.long = long_rows(context, self.original)
        for tokens_1N in context.tokens_BT[:, : len(prompt)].split(PREFILL_WIDTH, 1):
            kept = Lengths.of([tokens_1N.shape[1]], self.device)
            yield model.forward(ForwardBatch(cache, tokens_1N, kept=kept)).logits_BNV[0]
            cache.append(kept)

    def start(self, context: Context, read: ReadHidden | None = None) -> KVCache:
        """Caches all tokens of the context but the last, in forward passes of bounded width. Logits
        that are not finite there make those of later forward passes so, which are checked.

        Args:
            context: the batch.
            read: takes the hidden states of the layers that :meth:`with_hidden_states` chose.
        """
        return self.begin(context, read).finish()

    def begin(self, context: Context, read: ReadHidden | None = None) -> Prefill:
        """As :meth:`start`, but the caller runs the forward passes."""
        cache = self._cache(context)
        if self.spec.original is not None:
            cache.long = long_rows(context, self.spec.original)
        if self.prefixes is not None:
            assert read is None, "hidden states are read from the first token on"
            self.prefixes.reuse(cache)
            cache.prefixes = self.prefixes
        prefill = Prefill(self, cache, context, hidden_layers=self.hidden_layers, read=read)
        self._reserve(cache, prefill.next_width, max(context.lengths) - 1)
        return prefill

    def draft_room(self, length: int) -> int:
        """Most tokens of a draft that one forward pass can verify after so many committed ones."""
        if self.original is None or length > self.original:
            return self.limit
        return self.original - length

    def score(self, cache: KVCache, draft: Draft) -> Scores:
        """One forward pass over all nodes of the draft, after the committed tokens."""
        layers = self.hidden_layers
        if draft.is_chain:
            output = self.forward(ForwardBatch(cache, draft.tokens_BN, hidden_layers=layers))
            return Scores(output.logits_BNV, output.hidden_BNH)
        queries = draft.query_tokens
        tokens_BQ = draft.tokens_BN.gather(1, queries.node_BQ)
        nodes = Nodes(queries.ancestors_BQQ, queries.depth_BQ)
        output = self.forward(ForwardBatch(cache, tokens_BQ, nodes, hidden_layers=layers))
        return Scores(output.logits_BNV, output.hidden_BNH, queries)

    def commit(self, cache: KVCache, draft: Draft, verdict: Acceptance) -> None:
        """Keeps the root and the accepted path."""
        keep_accepted(cache, draft, verdict)

    def join(self, cache: KVCache, other: KVCache) -> None:
        """Appends the rows of another cache."""
        cache.join(other)

    def extend(
        self,
        cache: KVCache,
        tokens_BN: Tensor,
        nodes: Nodes | None = None,
        num_logits: int = 0,
    ) -> Tensor:
        """Logits (B, N, V) of one forward pass; arguments as the attributes of ``ForwardBatch``."""
        return self.forward(ForwardBatch(cache, tokens_BN, nodes, num_logits)).logits_BNV

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One forward pass over a batch; commits nothing."""
        if self.spec.original is not None:
            recompute_long_rows(self, batch.cache, self.spec.original)
        return runner.forward(self, batch)

    def draft(
        self,
        cache: KVCache,
        tokens_BN: Tensor,
        depth: int,
        parameters: DraftParameters | None,
        u_BD: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """A chain by one compiled program: see ``runner.fused_draft``. Integers in place of numbers
        in [0, 1) are those of ``coupled_draft.race_numbers``."""
        is_coupled = u_BD is not None and not u_BD.is_floating_point()
        plan = CoupledPlan(depth) if is_coupled else ChainPlan(depth)
        found = runner.fused_draft(self, cache, tokens_BN, plan, parameters, u_BD)
        if found is None:
            return None
        recorded_BNV, chain_BN = found
        return recorded_BNV, chain_BN

    def draft_by(
        self,
        plan: DraftPlan,
        cache: KVCache,
        tokens_BN: Tensor,
        parameters: DraftParameters | None,
        u_BD: Tensor | None,
    ) -> tuple[Tensor, ...] | None:
        """A chain or tree by one compiled program: see ``runner.fused_draft``."""
        return runner.fused_draft(self, cache, tokens_BN, plan, parameters, u_BD)

    def eager_executor(self, batch: ForwardBatch) -> EagerExecutor:
        """The executor that runs a batch where no compiled one does."""
        return self.eager

    def further_forwards(self) -> Sequence[tuple[str, Callable[[], None]]]:
        """The names of forward passes that rounds need besides those of the whole model, each with
        a function that runs it once, so that its program is compiled."""
        return ()

    @torch.inference_mode()
    def example_cache(self) -> KVCache:
        """A cache with one token, filled eagerly and outside every memory budget: what the model's
        KV buffers look like."""
        twin = self.without_compiled()
        twin.plan, twin.watch = KVCachePlan(self.plan.kv_dtype), Stopwatch(self.device)
        twin.prefixes = None
        return twin.start(unsampled_context(self, [0, 0]))

    def short_cache(self, context: Context, num_tokens: int) -> KVCache | None:
        """An empty cache outside every memory budget, for one forward pass over so many tokens of
        each row of a batch. None for a model whose cache holds more than the keys and values of
        these tokens."""
        plan = KVCachePlan(self.plan.kv_dtype)
        cache = KVCache(context, self.num_layers, self.limit + MARGIN, plan, _LITTLE)
        self._reserve(cache, num_tokens, num_tokens)
        return cache

    def non_finite(self, position: int) -> NonFiniteLogitsError:
        """The error for a row whose health is not finite; ``position`` is where its round began."""
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
        """How the module computes within this context: exactly, or as torch does."""
        return self.eager.arithmetic()

    def _check(self, module: PreTrainedModel, name: str) -> None:
        check_supported(module, name)

    def _cache(self, context: Context) -> KVCache:
        """An empty cache for a batch."""
        return KVCache(context, self.num_layers, self.limit + MARGIN, self.plan)

    def _reserve(self, cache: KVCache, width: int, num_slots: int) -> None:
        """Allocates the KV buffers of a prefill whose first pass over so many tokens of each row
        a compiled program runs, which cannot allocate them itself."""
        if not width or runner.compiled_executor(self, cache, width, 1) is None:
            return
        if self.layout is None:
            self.layout = _layout(self)
        cache.reserve(cache.num_rows, num_slots, self.layout)


def layout_of(cache: KVCache) -> KVLayout | None:
    """The shapes of a cache's KV buffers; None where not every layer has KV buffers."""
    sides = zip(cache.keys, cache.values, strict=True)
    buffers = [(key, value) for key, value in sides if key is not None and value is not None]
    if len(buffers) < len(cache.keys):
        return None
    shapes = tuple((key.shape[1], key.shape[3], value.shape[3]) for key, value in buffers)
    return KVLayout(shapes, buffers[0][0].dtype, buffers[0][0].device)


def _layout(model: HFModel) -> KVLayout:
    """The shapes of a model's KV buffers; no shapes where not every layer has KV buffers, which the
    first eager forward pass then allocates."""
    return layout_of(model.example_cache()) or KVLayout((), model.dtype, model.device)
