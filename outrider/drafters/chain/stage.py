"""The inner rounds of a stage: their text, the draft model as their target, and its distributions.

Legend: B rows, N nodes, M columns of a pass, K tokens emitted by an inner round, T capacity in
tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import Context, Draft, Scores, Stream, Verdict
from outrider.drafters.chain.model import fitted
from outrider.runtime import HFModel, KVCache


@dataclass
class StageContext(Context):
    """The draft model's text: the committed one, and behind it what the stage has drafted."""

    stream: Stream | None = None

    @classmethod
    def of(cls, context: Context) -> "StageContext":
        """A text of its own, so far the same, of the same batch."""
        text = cls(
            context.tokens_BT.clone(),
            context.length_B,
            list(context.lengths),
            context.prompt_length_B,
            context.key_B,
            context.distribution,
            context.sources,
            context.ends,
        )
        text.health = context.health
        return text

    @property
    def rng(self) -> Stream:
        """The numbers of the coming inner round."""
        assert self.stream is not None
        return self.stream

    def in_common_B(self, context: Context, first: int) -> Tensor:
        """How many leading tokens both texts share, (B,); of each row the ``first`` are."""
        end = min(self.tokens_BT.shape[1], context.tokens_BT.shape[1])
        same_BK = self.tokens_BT[:, first:end] == context.tokens_BT[:, first:end]
        most_B = torch.minimum(self.length_B, context.length_B)
        return torch.minimum(first + same_BK.long().cumprod(1).sum(1), most_B)

    def follow(self, context: Context) -> None:
        """Becomes the same text again."""
        self.tokens_BT, self.distribution = context.tokens_BT.clone(), context.distribution
        self.length_B, self.lengths = context.length_B, list(context.lengths)


class StageTarget:
    """The draft model as the target of inner rounds: its cache may lack more than the root.

    That is so behind a draft that was accepted to its last token, which no pass has seen yet: it
    goes into the first pass of the next draft, ahead of the nodes.

    Args:
        model: the draft model.
        num_tokens: width of the target's logits; the draft's are cut or padded to it.
    """

    def __init__(self, model: HFModel, num_tokens: int) -> None:
        self.model = model
        self.num_tokens = num_tokens

    def start(self, context: Context) -> KVCache:
        return self.model.start(context)

    def score(self, cache: KVCache, draft: Draft) -> Scores:
        context = cache.context
        most = max(n - 1 - m for n, m in zip(context.lengths, cache.lengths, strict=True))
        if most == 0:
            logits_BNV = self.model.score(cache, draft).logits_BNV
        elif draft.is_chain:
            logits_BNV = self._score_behind(cache, draft, most)
        else:
            self.model.extend(cache, self._known(self._text(cache, most)), num_logits=1)
            cache.length_B = context.length_B - 1
            logits_BNV = self.model.score(cache, draft).logits_BNV
        return Scores(fitted(logits_BNV, self.num_tokens))

    def commit(self, cache: KVCache, draft: Draft, verdict: Verdict) -> None:
        self.model.commit(cache, draft, verdict)

    def join(self, cache: KVCache, other: KVCache) -> None:
        self.model.join(cache, other)

    def _score_behind(self, cache: KVCache, draft: Draft, most: int) -> Tensor:
        """A chain's logits (B, N, V), by a pass over the text that a row's cache lacks (``most``
        tokens at most), the chain behind it, and anything behind that."""
        B, N = draft.tokens_BN.shape
        behind_B1 = (cache.context.length_B - 1 - cache.length_B)[:, None]
        node_BM = torch.arange(N + most, device=behind_B1.device) - behind_B1
        drafted_BM = draft.tokens_BN.gather(1, node_BM.clamp(0, N - 1))
        tokens_BM = torch.where(node_BM < 0, self._text(cache, N + most), drafted_BM)
        logits_BMV = self.model.extend(cache, self._known(tokens_BM))
        cache.length_B = cache.context.length_B - 1
        rows_B1 = torch.arange(B, device=behind_B1.device)[:, None]
        return logits_BMV[rows_B1, behind_B1 + torch.arange(N, device=behind_B1.device)]

    def _text(self, cache: KVCache, num_columns: int) -> Tensor:
        """The tokens behind those that are cached, (B, M); beyond the text, anything."""
        tokens_BT = cache.context.tokens_BT
        column_M = torch.arange(num_columns, device=tokens_BT.device)
        place_BM = cache.length_B[:, None] + column_M
        return tokens_BT.gather(1, place_BM.clamp(max=tokens_BT.shape[1] - 1))

    def _known(self, tokens_BM: Tensor) -> Tensor:
        """The target's padding, which it may emit, is no token of the draft's."""
        return tokens_BM.clamp(max=self.model.num_tokens - 1)


class StageDistributions:
    """The draft model's distributions at the places of a draft, gathered round by round.

    Args:
        context: what precedes the draft.
        γ: its length.
    """

    def __init__(self, context: Context, γ: int) -> None:
        self._first_B = context.length_B
        self._γ = γ
        self._q_BNV = torch.zeros(0)

    def add(self, p_BNV: Tensor, verdict: Verdict, before_B: Tensor) -> None:
        """The distributions that a round's tokens came from, the first of them at place
        ``before``."""
        B, _, V = p_BNV.shape
        if not len(self._q_BNV):
            self._q_BNV = p_BNV.new_zeros(B, self._γ + 1, V)
        rows_B1 = torch.arange(B, device=p_BNV.device)[:, None]
        node_BK = pad(verdict.path_BD, (1, 0))
        column_K = torch.arange(node_BK.shape[1], device=p_BNV.device)
        place_BK = (before_B - self._first_B)[:, None] + column_K
        counts_BK = (column_K <= verdict.num_accepted_B[:, None]) & (place_BK < self._γ)
        place_BK = torch.where(counts_BK, place_BK, self._γ)  # the leaf's, which nobody reads
        self._q_BNV[rows_B1, place_BK] = p_BNV[rows_B1, node_BK]

    @property
    def q_BNV(self) -> Tensor:
        """One distribution per node; zeros for the leaf, which has no children."""
        self._q_BNV[:, -1] = 0.0
        return self._q_BNV
