"""A smaller model drafts a chain, token by token.

Leviathan, Kalman and Matias, ICML 2023, Algorithm 1, first loop; Chen et al., 2023, Algorithm 2.

    x_i ~ q_i( . | context, x_1 … x_{i-1}),   i = 1 … γ

The model's cache never needs a pass of its own to catch up: after a round it lacks the root, and
also x_γ when all γ tokens were accepted, so the first pass of the next round feeds one or two
tokens per row.

A row may stop early, by a threshold on its tokens' q (``stop.py``). The token that stops it stays
in the draft and is verified, so the output's distribution is untouched.

Legend: B rows, N nodes (γ + 1), K columns fed, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Prefix,
    Scores,
    Stream,
    Verdict,
    best,
    counting,
)
from outrider.drafters.chain.pick import INDEPENDENT, Picker
from outrider.drafters.chain.stop import Confidence, Stop
from outrider.runtime import HFModel, KVCache


class ModelState:
    """The draft model's cache, and where the last draft stood.

    Attributes:
        cache: its ``length_B`` is always right, its host ``lengths`` once settled.
        roots: host context lengths when the last draft was made; None when that is settled.
        root_B: the same on the device.
        fed: drafted tokens of that draft that the cache has seen.
        open: whether that draft still waits for its commit.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.roots: list[int] | None = None
        self.root_B = cache.length_B
        self.fed = 0
        self.open = False

    def settle(self) -> None:
        """Works out the host lengths from the context, which by now knows what was accepted."""
        if self.open:  # never committed: nothing of it is kept, and its root is fed again
            self.cache.length_B = self.root_B - 1
            self.open = False
        if self.roots is not None:
            now = self.cache.context.lengths
            self.cache.lengths = [
                root + min(length - root - 1, self.fed)
                for root, length in zip(self.roots, now, strict=True)
            ]
            self.roots = None

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows; called before the context keeps its own."""
        self.settle()
        self.cache.keep(rows)

    def rewind(self, length_B: Tensor, lengths: Sequence[int]) -> None:
        """Forgets what lies beyond these lengths; called before the context does."""
        self.settle()
        self.cache.length_B = torch.minimum(self.cache.length_B, length_B)
        self.cache.lengths = list(map(min, self.cache.lengths, lengths))


class ModelBacked:
    """What drafters over a model share: its cache, and how that follows the text.

    Args:
        model: the draft model; must share the target's vocabulary.
        num_tokens: width of the target's logits; the draft's are cut or padded to it.
    """

    def __init__(self, model: HFModel, num_tokens: int) -> None:
        self.model = model
        self.num_tokens = num_tokens

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        return Capabilities((self.model,), max_nodes=_chain_slots, rewindable=True)

    def start(self, context: Context) -> ModelState:
        return ModelState(self.model.start(context))

    def commit(self, state: ModelState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Keeps the cached tokens that were accepted."""
        if state.roots is not None:
            state.cache.length_B = state.root_B + verdict.num_accepted_B.clamp(max=state.fed)
            state.open = False

    def join(self, state: ModelState, other: ModelState) -> None:
        """Appends the rows of another state; called before the context appends its own."""
        state.settle()
        other.settle()
        self.model.join(state.cache, other.cache)

    def _catch_up(self, state: ModelState, context: Context) -> Tensor:
        """Feeds the committed tokens that the cache lacks; logits behind the last one, (B, V)."""
        cache = state.cache
        lacking = self._lacking(state, context)
        K = max(lacking)
        tokens_BK = self._uncached(state, context, K)
        first_B = cache.length_B
        logits_BKV = self.model.extend(cache, tokens_BK)
        first_B = cache.length_B
        state.roots, state.root_B, state.fed = list(context.lengths), context.length_B, 0
        state.open = True
        cache.length_B, cache.lengths = context.length_B, list(context.lengths)
        if min(lacking) == K:
            return logits_BKV[:, -1]
        last_B = (context.length_B - first_B - 1)[:, None, None]
        return logits_BKV.gather(1, last_B.expand(-1, 1, logits_BKV.shape[2]))[:, 0]

    def _lacking(self, state: ModelState, context: Context) -> list[int]:
        """How many committed tokens of each row the cache has not seen."""
        return [n - c for n, c in zip(context.lengths, state.cache.lengths, strict=True)]

    def _uncached(self, state: ModelState, context: Context, K: int) -> Tensor:
        """K tokens from the first one on that the cache lacks, (B, K)."""
        cache = state.cache
        if context.is_even and min(cache.lengths) == max(cache.lengths):
            tokens_BK = context.tokens_BT[:, cache.lengths[0] : cache.lengths[0] + K]
        else:
            place_BK = cache.length_B[:, None] + counting(K, context.device)
            place_BK = place_BK.clamp_(max=context.tokens_BT.shape[1] - 1)
            tokens_BK = context.tokens_BT.gather(1, place_BK)
        if self.model.num_tokens < self.num_tokens:  # the target's padding may be emitted
            tokens_BK = tokens_BK.clamp(max=self.model.num_tokens - 1)
        return tokens_BK

    def _step(self, state: ModelState, x_B: Tensor) -> Tensor:
        """Feeds one drafted token per row; logits behind it, (B, V)."""
        cache = state.cache
        logits_BV = self.model.extend(cache, x_B[:, None])[:, -1]
        cache.length_B = cache.length_B + 1
        cache.lengths = [length + 1 for length in cache.lengths]
        state.fed += 1
        return logits_BV


class ModelDrafter(ModelBacked):
    """Samples a chain from a draft model, under the same sampling parameters as the target.

    Args:
        model: the draft model; must share the target's vocabulary.
        num_tokens: width of the target's logits; the draft's are cut or padded to it.
        stop: where a row stops before its budget; a number is a threshold of confidence, 0 never.
        picker: how a token is taken from its distribution.
        keep_logits: hand over the model's logits when all rows are greedy, for rules that verify
            by more than the argmax there.

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
        stops = self.stop is not None
        return replace(super().capabilities, full_chains=not stops, stops_early=stops)

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        state.settle()
        γ, greedy = budget.max_tokens, context.distribution.greedy
        tokens, rows = [context.root_B], []
        going = None if self.stop is None else _Going(self.stop, context)
        pick = _argmax if greedy else self._picker.start(rng, γ)
        for i in range(γ):
            logits_BV = self._step(state, tokens[-1]) if i else self._catch_up(state, context)
            exists_B = None if going is None else going.exists[i]
            row_BV = self._row(logits_BV, Prefix.of_chain(context, tokens[1:], exists_B))
            x_B = pick(row_BV, i)
            tokens.append(x_B)
            rows.append(row_BV)
            if going is not None:
                q_BV = row_BV.softmax(-1) if greedy else row_BV
                if not going.on(q_BV.gather(1, x_B[:, None])[:, 0]):
                    break
        mask_BN = self._within(budget, len(tokens), context)
        if going is not None:
            exists_BN = torch.stack(going.exists[: len(tokens)], 1)
            mask_BN = exists_BN if mask_BN is None else mask_BN & exists_BN
        drawn: Drawn = "chosen" if greedy or not γ else self.drawn
        shares_noise = γ and not greedy and self._picker.draws and drawn == "chosen"
        return Draft.chain(
            torch.stack(tokens, 1),
            mask_BN,
            _with_last(rows) if drawn == "iid" else None,
            drawn,
            _with_last(rows) if greedy and γ and self.keep_logits else None,
            drawn_probs_BN=_token_probs(rows, tokens) if shares_noise else None,
        )

    def _within(self, budget: Budget, num_nodes: int, context: Context) -> Tensor | None:
        """Which nodes of a chain each row may draft, (B, N); None if all may draft all."""
        if budget.tokens_B is None:
            return None
        return counting(num_nodes, context.device) <= budget.tokens_B[:, None]

    def _row(self, logits_BV: Tensor, prefix: Prefix) -> Tensor:
        """The distribution of the next token, (B, V); its logits if all rows are greedy."""
        logits_B1V = fitted(logits_BV, self.num_tokens)[:, None]
        distribution = prefix.context.distribution
        return (distribution.logits if distribution.greedy else distribution)(logits_B1V, prefix)[
            :, 0
        ]


class _Going:
    """Which rows of a draft go on.

    Attributes:
        exists: whether each node so far exists, and the next one, by node (B,).
    """

    def __init__(self, stop: Stop, context: Context) -> None:
        self._stop = stop
        self._survival_B = torch.ones((), device=context.device)
        everywhere_B = torch.ones(context.num_rows, dtype=torch.bool, device=context.device)
        self.exists = [everywhere_B, everywhere_B]

    def on(self, q_B: Tensor) -> bool:
        """Takes the draft's probabilities of the tokens drafted last; whether any row goes on. A
        look at the device, which on a GPU too costs less than the passes that it saves."""
        self._survival_B = self._survival_B * q_B
        going_B = self.exists[-1] & self._stop.goes_on(q_B, self._survival_B)
        self.exists.append(going_B)
        return bool(going_B.any())


def _chain_slots(num_tokens: int) -> int:
    """Slots of a chain, and one more, since a row may lack a token that another row has."""
    return num_tokens + 2


def _argmax(row_BV: Tensor, i: int) -> Tensor:
    return best(row_BV)


def _with_last(rows: list[Tensor]) -> Tensor:
    """Rows of places 0 … γ-1, and one of zeros for the last token, which has no children."""
    return torch.stack([*rows, torch.zeros_like(rows[-1])], 1)


def _token_probs(rows: list[Tensor], tokens: list[Tensor]) -> Tensor:
    """The probability of each drafted token under its row, (B, N); 1 at the root."""
    pairs = zip(rows, tokens[1:], strict=True)
    probs = [row_BV.gather(1, x_B[:, None])[:, 0] for row_BV, x_B in pairs]
    return torch.stack([torch.ones_like(probs[0]), *probs], 1)


def fitted(logits_BV: Tensor, num_tokens: int) -> Tensor:
    """Cut or padded to the target's width; padding is never drawn."""
    missing = num_tokens - logits_BV.shape[-1]
    if missing == 0:
        return logits_BV
    if missing < 0:
        return logits_BV[..., :num_tokens]
    return torch.nn.functional.pad(logits_BV, (0, missing), value=-torch.inf)
