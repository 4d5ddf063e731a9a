"""A smaller model drafts a chain, token by token.

Leviathan, Kalman and Matias, ICML 2023, Algorithm 1, first loop; Chen et al., 2023, Algorithm 2.

    x_i ~ q_i( . | context, x_1 … x_{i-1}),   i = 1 … γ

The draft model's cache needs no forward pass only to catch up as long as every round drafts. After
a round it lacks the root, and also x_γ when all γ tokens were accepted, so the first pass of the
next round feeds one or two tokens per row. Rounds of γ = 0 do not touch the model; what it lacks
after many of them it reads in passes of bounded width before it drafts again.

A row may stop early, by a threshold on the q of its tokens (``stop.py``). The token that stops a
row stays in the draft and is verified, so the distribution of the output does not change.

Legend: B rows, N nodes (γ + 1), K tokens fed, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core import (
    REVIEW_WIDTH,
    Acceptance,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Lengths,
    Prefix,
    Role,
    Scores,
    Stream,
    argmax,
    cached_arange,
)
from outrider.core.chain import draft_chain, with_leaf
from outrider.drafters.chain.pick import INDEPENDENT, Picker
from outrider.drafters.chain.stop import Confidence, Stop
from outrider.runtime import HFModel, KVCache
from outrider.runtime.executors.fused_draft import DraftPlan
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.prefill import Prefilling
from outrider.sampling import Warp
from outrider.sampling.warp import DraftParameters

_USUAL = 2  # tokens that a row lacks at most if the last round drafted
_FEW = 8  # tokens whose logits may be computed without need

BACKLOG_WIDTH = 64
"""Most tokens that a pass feeds to a draft model that fell behind."""


class ModelState:
    """The draft model's cache.

    Between ``propose`` and ``commit`` it holds the context and the tokens of the draft that the
    model has read; otherwise it holds a part of the context that lacks at least the last token.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows; called before the context keeps its own."""
        self.cache.keep(rows)

    def rollback(self, lengths: Lengths) -> None:
        """Forgets all but the first ``lengths`` tokens of each row."""
        self.cache.rollback(lengths)


class ModelBacked:
    """What all drafters with a draft model share: its cache, and how it follows the context.

    Args:
        model: the draft model; must share the target's vocabulary.
        num_tokens: width of the target's logits; the draft model's are cut or padded to it.
    """

    def __init__(self, model: HFModel, num_tokens: int) -> None:
        self.model = model
        self.num_tokens = num_tokens

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        return Capabilities((self.model,), max_nodes=_chain_slots, rewindable=True)

    def start(self, context: Context) -> ModelState:
        state: ModelState = self.begin(context).finish()
        return state

    def begin(self, context: Context) -> Prefilling:
        """As :meth:`start`, but the caller runs the forward passes."""
        prefill = self.model.begin(context)
        return Prefilling(ModelState(prefill.cache), [prefill])

    def start_late(self, context: Context) -> ModelState:
        """As :meth:`start`, but the model reads the prompts when it first drafts."""
        cache = self.model.begin(context).cache
        cache.health = context.health
        return ModelState(cache)

    def commit(self, state: ModelState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Keeps the accepted tokens that the cache holds."""
        if draft.num_nodes == 1:  # the model has read nothing
            return
        committed = state.cache.context.sequence_lengths
        state.rollback(committed + verdict.num_accepted)

    def join(self, state: ModelState, other: ModelState) -> None:
        """Appends the rows of another state; called before the context appends its own."""
        self.model.join(state.cache, other.cache)

    def _catch_up(self, state: ModelState, context: Context) -> Tensor:
        """Feeds the committed tokens that the cache lacks; logits after the last one, (B, V)."""
        cache = state.cache
        lacking = self._read_backlog(state, context)
        K = max(lacking)
        if K > _USUAL:
            self._forget_read(state, context, K)
            lacking = self._lacking(state, context)
        tokens_BK = self._uncached(state, context, K)
        first_B = cache.length_B
        logits_BKV = self.model.extend(cache, tokens_BK)
        cache.append(K)
        if min(lacking) == K:
            return logits_BKV[:, -1]
        cache.rollback(context.sequence_lengths)
        last_B = (context.length_B - first_B - 1)[:, None, None]
        return logits_BKV.gather(1, last_B.expand(-1, 1, logits_BKV.shape[2]))[:, 0]

    @property
    def _has_programs(self) -> bool:
        """Whether compiled programs can draft with the model."""
        compiled = self.model.compiled
        usable = compiled is not None and not compiled.failed
        return usable and self.model.num_tokens == self.num_tokens

    def _draft_by(
        self, plan: DraftPlan, state: ModelState, context: Context, rng: Stream, *, sampled: bool
    ) -> tuple[Tensor, ...] | None:
        """What the sampled or the greedy program of a tree returns (``runner.fused_draft``); None
        if there is none. The rows can be aligned, and the cache then forgets the drafted nodes."""
        parameters, u_BR = None, None
        if sampled:
            assert isinstance(context.distribution, Warp)
            parameters = context.distribution.draft_parameters(context)
            u_BR = rng.uniform(Role.DRAFT, plan.num_draws)
        return self._run_plan(plan, state, context, parameters, u_BR)

    def _run_plan(
        self,
        plan: DraftPlan,
        state: ModelState,
        context: Context,
        parameters: DraftParameters | None,
        u_BR: Tensor | None,
    ) -> tuple[Tensor, ...] | None:
        """What ``runner.fused_draft`` returns, which is fed the tokens that the cache lacks."""
        tokens_BK = self._aligned(state, context)
        found = self.model.draft_by(plan, state.cache, tokens_BK, parameters, u_BR)
        if found is not None:
            state.cache.append(tokens_BK.shape[1])
        return found

    def _can_align(self, state: ModelState, context: Context) -> bool:
        """Whether all rows can be fed as many tokens as the row that lacks most. Reads the
        backlog."""
        return max(self._read_backlog(state, context)) <= min(context.lengths)

    def _aligned(self, state: ModelState, context: Context) -> Tensor:
        """The committed tokens that the cache lacks, root last, as many in each row, (B, K). A row
        that lacks fewer is fed its last ones again, which rewrites what the cache holds already."""
        lacking = self._lacking(state, context)
        K = max(lacking)
        if min(lacking) < K:
            state.cache.rollback(context.sequence_lengths - K)
        return self._uncached(state, context, K)

    def _read_backlog(
        self, state: ModelState, context: Context, few: int = _FEW, left: int = 1
    ) -> list[int]:
        """Feeds tokens until no row lacks more than a few, in passes of bounded width that compute
        the logits of one token only; they leave ``left`` tokens, which are no more than a few.
        Forgets the last draft before if no ``commit`` followed it, and the root, which is fed
        again. Returns how many tokens each row then lacks."""
        lacking = self._lacking(state, context)
        if min(lacking) < 1:
            state.rollback(context.sequence_lengths - 1)
            lacking = self._lacking(state, context)
        while (missing := max(lacking)) > few:
            width = min(missing - left, BACKLOG_WIDTH)
            self._forget_read(state, context, width + left)
            lacking = self._lacking(state, context)
            kept = Lengths.of([min(width, n - left) for n in lacking], context.device)
            tokens_BK = self._uncached(state, context, width)
            self.model.forward(ForwardBatch(state.cache, tokens_BK, num_logits=1, kept=kept))
            state.cache.append(kept)
            lacking = self._lacking(state, context)
        return lacking

    def _forget_read(self, state: ModelState, context: Context, K: int) -> None:
        """Makes rows that lack fewer than K tokens lack K, if forgetting costs nothing. They are
        fed their last tokens again, which rewrites what the cache holds, rather than tokens beyond
        their context, whose slots are not reserved."""
        if state.cache.cuts_back:
            kept = [max(0, n - K) for n in context.lengths]
            state.rollback(Lengths.of(kept, context.device))

    def _lacking(self, state: ModelState, context: Context) -> list[int]:
        """How many committed tokens of each row the cache does not hold."""
        cached = state.cache.sequence_lengths.host
        return [n - c for n, c in zip(context.sequence_lengths.host, cached, strict=True)]

    def _uncached(self, state: ModelState, context: Context, K: int) -> Tensor:
        """The K tokens that follow those in the cache, (B, K)."""
        cache, cached = state.cache, state.cache.sequence_lengths.host
        if context.is_even and min(cached) == max(cached):
            tokens_BK = context.tokens_BT[:, cached[0] : cached[0] + K]
        else:
            position_BK = cache.length_B[:, None] + cached_arange(K, context.device)
            position_BK = position_BK.clamp_(max=context.tokens_BT.shape[1] - 1)
            tokens_BK = context.tokens_BT.gather(1, position_BK)
        if self.model.num_tokens < self.num_tokens:  # the target may emit a token of its padding
            tokens_BK = tokens_BK.clamp(max=self.model.num_tokens - 1)
        return tokens_BK

    def _within(self, budget: Budget, num_nodes: int, context: Context) -> Tensor | None:
        """Which nodes of a chain are within each row's budget, (B, N); None if all are."""
        if budget.tokens_B is None:
            return None
        return cached_arange(num_nodes, context.device) <= budget.tokens_B[:, None]

    def _step(self, state: ModelState, x_B: Tensor) -> Tensor:
        """Feeds one drafted token per row; logits after it, (B, V)."""
        logits_BV = self.model.extend(state.cache, x_B[:, None])[:, -1]
        state.cache.append(1)
        return logits_BV


class ModelDrafter(ModelBacked):
    """Samples a chain from a draft model, under the same sampling parameters as the target.

    Args:
        model: the draft model; must share the target's vocabulary.
        num_tokens: width of the target's logits; the draft model's are cut or padded to it.
        stop: where a row stops before its budget. A number is a threshold of confidence; 0 never
            stops.
        picker: how a token is taken from its distribution.
        keep_logits: whether drafts of greedy rows carry the model's logits, for rules that verify
            by more than the argmax.

    Raises:
        InvalidParameterError: a confidence outside [0, 1].
    """

    def __init__(
        self,
        model: HFModel,
        num_tokens: int,
        stop: Stop | float | None = None,
        *,
        picker: Picker = INDEPENDENT,
        keep_logits: bool = False,
    ) -> None:
        super().__init__(model, num_tokens)
        if isinstance(stop, int | float):
            stop = Confidence(stop) if stop else None
        self.stop = stop
        self.keep_logits = keep_logits
        self._picker = picker

    @property
    def drawn(self) -> Drawn:
        return self._picker.drawn

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        return replace(
            super().capabilities,
            stops_early=self.stop is not None,
            keeps_logits=self.keep_logits,
            shares_noise=self._shares_noise,
            reviews=self._picker is INDEPENDENT and self.model.num_tokens >= self.num_tokens,
            starts_late=self.model.decoder_prompt is None,
        )

    @property
    def _shares_noise(self) -> bool:
        return self._picker.draws and self.drawn == "chosen"

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        γ, greedy = budget.max_tokens, context.distribution.greedy
        if not γ:
            return Draft.root_only(context.root_B)
        going = None if self.stop is None else Going(self.stop, context)
        tokens, rows = self._chain(state, context, γ, rng, going)
        mask_BN = self._within(budget, len(tokens), context)
        if going is not None:
            exists_BN = torch.stack(going.exists[: len(tokens)], 1)
            mask_BN = exists_BN if mask_BN is None else mask_BN & exists_BN
        drawn: Drawn = "chosen" if greedy else self.drawn
        shares_noise = not greedy and self._shares_noise
        return Draft.chain(
            torch.stack(tokens, 1),
            mask_BN,
            with_leaf(rows) if drawn == "iid" else None,
            drawn,
            with_leaf(rows) if greedy and self.keep_logits else None,
            drawn_probs_BN=token_probs(rows, tokens) if shares_noise else None,
        )

    def _chain(
        self, state: ModelState, context: Context, γ: int, rng: Stream, going: "Going | None"
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The tokens from the root on, each (B,), and their distributions, or logits of greedy
        rows, (B, V): at most γ, fewer where all rows stop."""
        pick = _argmax if context.distribution.greedy else self._picker.start(rng, γ)

        def step(tokens: Sequence[Tensor]) -> Tensor:
            drafted = len(tokens) > 1
            return self._step(state, tokens[-1]) if drafted else self._catch_up(state, context)

        def choose(logits_BV: Tensor, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            i = len(tokens) - 1
            exists_B = None if going is None else going.exists[i]
            row_BV = self._row(logits_BV, Prefix.of_chain(context, tokens[1:], exists_B))
            return row_BV, pick(row_BV, i)

        return draft_chain(context.root_B, γ, step, choose, None if going is None else going.on)

    def review(self, state: ModelState | None, context: Context, num_tokens: int) -> Tensor | None:
        """As ``ReviewsTokens.review``; None for rows whose logits are changed, and for a model that
        cannot take tokens back, or reads more than the tokens."""
        K, distribution = num_tokens, context.distribution
        is_plain = isinstance(distribution, Warp) and distribution.keeps_logits
        if not is_plain:
            return None
        if state is None:
            logits_BKV = self._read_newest(context, K)
        else:
            logits_BKV = self._read_before_root(state, context, K)
        if logits_BKV is None:
            return None
        logits_BKV = fitted(logits_BKV, self.num_tokens)
        x_BK = self._newest(context, K)
        if distribution.greedy:
            return (argmax(logits_BKV) == x_BK).float()
        q_BKV = distribution(logits_BKV, Prefix.of_chain(context, ()))
        return q_BKV.gather(2, x_BK[..., None])[..., 0]

    def _read_before_root(self, state: ModelState, context: Context, K: int) -> Tensor | None:
        """Reads what the cache lacks ahead of the root, in one pass if it is not much; logits after
        the last K of these tokens, (B, K, V). None where the cache cannot take tokens back."""
        if not state.cache.cuts_back:
            return None
        few = max(K, min(REVIEW_WIDTH, min(context.lengths) - 1)) + 1  # the root included
        N = max(K + 1, *self._read_backlog(state, context, few, K + 1))
        self._forget_read(state, context, N)
        tokens_BN = self._uncached(state, context, N)
        logits_BKV = self.model.extend(state.cache, tokens_BN[:, :-1], num_logits=K)
        state.cache.append(N - 1)
        return logits_BKV

    def _read_newest(self, context: Context, K: int) -> Tensor | None:
        """As :meth:`_read_before_root`, but reads the newest tokens alone, in a cache of their own.
        None for a model whose cache holds other things besides (``HFModel.short_cache``)."""
        width = min(REVIEW_WIDTH, min(context.lengths) - 1)
        cache = self.model.short_cache(context, width)
        if cache is None:
            return None
        tokens_BN = self._newest(context, width + 1)[:, :-1]
        return self.model.extend(cache, tokens_BN, num_logits=K)

    def _newest(self, context: Context, K: int) -> Tensor:
        """The last K tokens of each row, (B, K)."""
        position_BK = context.length_B[:, None] - K + cached_arange(K, context.device)
        return context.tokens_BT.gather(1, position_BK)

    def _row(self, logits_BV: Tensor, prefix: Prefix) -> Tensor:
        """The distribution of the next token, (B, V); its logits if all rows are greedy."""
        logits_B1V = fitted(logits_BV, self.num_tokens)[:, None]
        distribution = prefix.context.distribution
        return (distribution.logits if distribution.greedy else distribution)(logits_B1V, prefix)[
            :, 0
        ]


class Going:
    """Which rows of a draft have not stopped yet.

    Attributes:
        exists: by node, whether it exists in each row (B,); of the nodes so far and the next one.
    """

    def __init__(self, stop: Stop, context: Context) -> None:
        self._stop = stop
        self._greedy = context.distribution.greedy
        self._survival_B = torch.ones((), device=context.device)
        everywhere_B = torch.ones(context.num_rows, dtype=torch.bool, device=context.device)
        self.exists = [everywhere_B, everywhere_B]

    def on(self, row_BV: Tensor, x_B: Tensor) -> bool:
        """Whether any row goes on after the tokens drafted last. Waits for the device, which on a
        GPU too costs less than the forward passes that it saves.

        Args:
            row_BV: the distributions of these tokens, or their logits where rows are greedy.
            x_B: the tokens.
        """
        q_BV = row_BV.softmax(-1) if self._greedy else row_BV
        q_B = q_BV.gather(1, x_B[:, None])[:, 0]
        self._survival_B = self._survival_B * q_B
        going_B = self.exists[-1] & self._stop.goes_on(q_B, self._survival_B)
        self.exists.append(going_B)
        return bool(going_B.any())


def _chain_slots(num_tokens: int) -> int:
    """Slots of a chain, and one more, since a row may lack a token that another row has."""
    return num_tokens + 2


def _argmax(row_BV: Tensor, i: int) -> Tensor:
    return argmax(row_BV)


def token_probs(rows: Sequence[Tensor], tokens: Sequence[Tensor]) -> Tensor:
    """The probability of each drafted token under its distribution, (B, N); 1 at the root."""
    pairs = zip(rows, tokens[1:], strict=True)
    probs = [row_BV.gather(1, x_B[:, None])[:, 0] for row_BV, x_B in pairs]
    return torch.stack([torch.ones_like(probs[0]), *probs], 1)


def fitted(logits_BV: Tensor, num_tokens: int) -> Tensor:
    """Logits cut or padded to ``num_tokens``, the target's width; padding is never drawn."""
    missing = num_tokens - logits_BV.shape[-1]
    if missing == 0:
        return logits_BV
    if missing < 0:
        return logits_BV[..., :num_tokens]
    return torch.nn.functional.pad(logits_BV, (0, missing), value=-torch.inf)
