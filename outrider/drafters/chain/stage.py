"""The inner rounds of a stage: their sequences, the draft model as their target, its distributions.

Legend: B rows, N nodes, M query tokens of a forward pass, K tokens emitted by an inner round,
T capacity in tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import Acceptance, Context, Draft, Lengths, Scores, Stream, Verdict
from outrider.drafters.chain.model import fitted
from outrider.runtime import HFModel, KVCache


@dataclass
class StageContext(Context):
    """The sequences of inner rounds: the committed tokens, and after them what the stage has
    drafted.

    Attributes:
        stream: the random numbers of the coming inner round.
    """

    stream: Stream | None = None

    @classmethod
    def of(cls, context: Context) -> "StageContext":
        """A copy of a context."""
        sequences = cls(
            context.tokens_BT.clone(),
            context.sequence_lengths,
            context.prompt_length_B,
            context.key_B,
            context.distribution,
            context.sources,
            context.ends,
        )
        sequences.health = context.health
        return sequences

    @property
    def rng(self) -> Stream:
        """The random numbers of the coming inner round."""
        assert self.stream is not None
        return self.stream

    def in_common_B(self, context: Context, first: int) -> Tensor:
        """How many leading tokens both contexts share, (B,). The first ``first`` tokens of each row
        are known to be the same."""
        end = min(self.tokens_BT.shape[1], context.tokens_BT.shape[1])
        same_BK = self.tokens_BT[:, first:end] == context.tokens_BT[:, first:end]
        most_B = torch.minimum(self.length_B, context.length_B)
        return torch.minimum(first + same_BK.long().cumprod(1).sum(1), most_B)

    def return_to(self, context: Context) -> None:
        """Becomes a copy of the context again."""
        self.follow(context.tokens_BT.clone(), context.sequence_lengths)
        self.distribution = context.distribution


class StageTarget:
    """The draft model as the target of inner rounds: its cache may lack more than the root.

    It does after a draft that was accepted to its last token, which the model has not read yet.
    The first forward pass of the next draft feeds that token ahead of the nodes.

    Args:
        model: the draft model.
        num_tokens: width of the target's logits; the draft model's are cut or padded to it.
    """

    def __init__(self, model: HFModel, num_tokens: int) -> None:
        self.model = model
        self.num_tokens = num_tokens

    def start(self, context: Context) -> KVCache:
        return self.model.start(context)

    def score(self, cache: KVCache, draft: Draft) -> Scores:
        if all(n - 1 == m for n, m in zip(cache.context.lengths, cache.lengths, strict=True)):
            logits_BNV = self.model.score(cache, draft).logits_BNV
        else:
            logits_BNV = self._score_after(cache, draft)
        return Scores(fitted(logits_BNV, self.num_tokens))

    def commit(self, cache: KVCache, draft: Draft, verdict: Acceptance) -> None:
        self.model.commit(cache, draft, verdict)

    def join(self, cache: KVCache, other: KVCache) -> None:
        self.model.join(cache, other)

    def _score_after(self, cache: KVCache, draft: Draft) -> Tensor:
        """Logits of a draft, (B, N, V), after committed tokens that the cache lacks."""
        lacking = cache.context.sequence_lengths - 1 - cache.sequence_lengths
        if draft.is_chain:
            return self._score_chain_after(cache, draft, lacking)
        tokens_BM = self._known(self._uncached(cache, max(lacking.host)))
        self.model.extend(cache, tokens_BM, num_logits=1)
        cache.append(lacking)
        return self.model.score(cache, draft).logits_BNV

    def _score_chain_after(self, cache: KVCache, draft: Draft, lacking: Lengths) -> Tensor:
        """The same of a chain, by one forward pass. Its query tokens are those that the row's cache
        lacks, the chain, and as many arbitrary tokens as make all rows equally long."""
        B, N = draft.tokens_BN.shape
        most, lacking_B1 = max(lacking.host), lacking.device_B[:, None]
        node_BM = torch.arange(N + most, device=lacking_B1.device) - lacking_B1
        drafted_BM = draft.tokens_BN.gather(1, node_BM.clamp(0, N - 1))
        tokens_BM = torch.where(node_BM < 0, self._uncached(cache, N + most), drafted_BM)
        logits_BMV = self.model.extend(cache, self._known(tokens_BM))
        cache.append(lacking)
        rows_B1 = torch.arange(B, device=lacking_B1.device)[:, None]
        return logits_BMV[rows_B1, lacking_B1 + torch.arange(N, device=lacking_B1.device)]

    def _uncached(self, cache: KVCache, num_tokens: int) -> Tensor:
        """The tokens that follow those in the cache, (B, M); beyond the context, arbitrary ones."""
        tokens_BT = cache.context.tokens_BT
        step_M = torch.arange(num_tokens, device=tokens_BT.device)
        position_BM = cache.length_B[:, None] + step_M
        return tokens_BT.gather(1, position_BM.clamp(max=tokens_BT.shape[1] - 1))

    def _known(self, tokens_BM: Tensor) -> Tensor:
        """Tokens that the draft model has. The target may emit a token of its padding."""
        return tokens_BM.clamp(max=self.model.num_tokens - 1)


class StageDistributions:
    """The draft model's distributions at the nodes of a draft, gathered from inner rounds.

    Args:
        context: the context that the draft continues.
        γ: the length of the draft.
    """

    def __init__(self, context: Context, γ: int) -> None:
        self._first_B = context.length_B
        self._γ = γ
        self._q_BNV = torch.zeros(0)

    def add(self, p_BNV: Tensor, verdict: Verdict, before_B: Tensor) -> None:
        """Adds the distributions that the tokens of an inner round were drawn from.

        Args:
            p_BNV: the draft model's distributions at the nodes of that round.
            verdict: that round's.
            before_B: lengths of the sequences before that round.
        """
        B, _, V = p_BNV.shape
        if not len(self._q_BNV):
            self._q_BNV = p_BNV.new_zeros(B, self._γ + 1, V)
        rows_B1 = torch.arange(B, device=p_BNV.device)[:, None]
        node_BK = pad(verdict.path_BD, (1, 0))
        step_K = torch.arange(node_BK.shape[1], device=p_BNV.device)
        position_BK = (before_B - self._first_B)[:, None] + step_K
        counts_BK = (step_K <= verdict.num_accepted_B[:, None]) & (position_BK < self._γ)
        position_BK = torch.where(counts_BK, position_BK, self._γ)  # the leaf: never read
        self._q_BNV[rows_B1, position_BK] = p_BNV[rows_B1, node_BK]

    @property
    def q_BNV(self) -> Tensor:
        """The distributions of all nodes; zeros for the leaf, which has no children."""
        self._q_BNV[:, -1] = 0.0
        return self._q_BNV
