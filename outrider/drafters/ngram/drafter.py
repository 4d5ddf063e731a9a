"""An n-gram model drafts: a table from a corpus in place of a draft model.

The cheapest drafts of Leviathan, Kalman and Matias, ICML 2023 (Table 3: unigrams and bigrams), and
of Spector and Ré, "Accelerating LLM Inference with Staged Speculative Decoding", 2023 (a trigram
model below the draft model). https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2308.04623

    sample:  x_i ~ q_i,   q_i = the request's distribution of  log q( . | x_{i-n+1} … x_{i-1})
    argmax:  x_i = argmax_x q(x | x_{i-n+1} … x_{i-1})

Temperature, truncation and penalties thus act on the table's distribution as they do on the
target's; where no row asks for any, q_i is the table's distribution as it stands, and no logarithm
is taken. The argmax is the table's own, whatever the request asks for, and is written in the file:
it costs a few binary searches, and no distribution is computed. Batches of rows at temperature 0
draft it either way.

The table lives on the host. An accelerator is read once per round for the contexts' last tokens,
and when sampling once more per drafted token.

Optional confidence stop, as in the draft model's chain: no further after a token whose probability
(of ``sample`` under q_i, of ``argmax`` in the table) is below ``confidence``. The token stays.

Legend: B rows, N nodes (D + 1), D drafted tokens, K last tokens, V vocabulary.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Context,
    Draft,
    Drawn,
    Prefix,
    Role,
    Scores,
    Stream,
    Verdict,
    draw,
)
from outrider.core.errors import InvalidParameterError, VocabularyMismatchError
from outrider.drafters.chain.model import fitted
from outrider.drafters.chain.none import NoState
from outrider.drafters.ngram.table import NgramTable
from outrider.runtime import HFModel
from outrider.sampling import Warp

How = Literal["sample", "argmax"]


class NgramDrafter:
    """Drafts a chain from an n-gram table.

    Args:
        table: the model; its vocabulary must be the target's.
        num_tokens: width of the target's logits; beyond the table's vocabulary nothing is drafted.
        how: ``sample`` from its distribution or take its ``argmax``.
        confidence: stop a row after a token with a smaller probability; 0 never stops.
        dtype: of the distributions, float32 or float64.

    Raises:
        InvalidParameterError: another ``how``, a confidence outside [0, 1].
    """

    def __init__(
        self,
        table: NgramTable,
        num_tokens: int,
        how: How = "sample",
        confidence: float = 0.0,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if how not in get_args(How):
            raise InvalidParameterError(f"draw={how!r}: must be one of {', '.join(get_args(How))}")
        if not 0 <= confidence <= 1:
            raise InvalidParameterError(
                f"draft_confidence={confidence!r}: must be in [0, 1]; 0 never stops early"
            )
        self.table = table
        self.num_tokens = num_tokens
        self.confidence = confidence
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.drawn: Drawn = "iid" if how == "sample" else "chosen"

    def start(self, context: Context) -> NoState:
        return NoState()

    def propose(self, state: NoState, context: Context, budget: Budget, rng: Stream) -> Draft:
        tails = _tails(context, max(self.table.order - 1, 1))
        if self.drawn == "chosen" or context.distribution.greedy or not budget.max_tokens:
            return self._best(tails, context, budget)
        return self._sampled(tails, context, budget, rng)

    def commit(self, state: NoState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Nothing to learn: the context is all it needs."""

    def join(self, state: NoState, other: NoState) -> None:
        """Nothing to join."""

    def _best(self, tails: list[list[int]], context: Context, budget: Budget) -> Draft:
        D, table = budget.max_tokens, self.table
        rows, lengths = [], []
        for tail in tails:
            row, nodes, sure = tail[-1:], table.nodes(tail[:-1]), True
            while sure and len(row) <= D:
                nodes = table.step(nodes, row[-1])
                x = table.best(nodes)
                sure = not self.confidence or table.probability(nodes, x) >= self.confidence
                row.append(x)
            lengths.append(len(row) - 1)
            rows.append(row + [0] * (D + 1 - len(row)))
        tokens_BN = torch.tensor(rows, device=context.device)
        limit_B = torch.tensor(lengths, device=context.device) if self.confidence else None
        return Draft.chain(tokens_BN, _within(tokens_BN, limit_B, budget.tokens_B), None, "chosen")

    def _sampled(
        self, tails: list[list[int]], context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        D = budget.max_tokens
        u_BD = rng.uniform(Role.DRAFT, D)
        nodes = [self.table.nodes(tail) for tail in tails]
        going_B = torch.ones_like(context.length_B, dtype=torch.bool)
        limit_B = torch.zeros_like(context.length_B)
        tokens = [context.root_B]
        probs_BNV = torch.zeros(
            len(tails), D + 1, self.num_tokens, dtype=self._dtype, device=context.device
        )
        for i in range(D):
            q_BV = probs_BNV[:, i]
            self._write_distribution(q_BV, nodes, Prefix.of_chain(context, tokens[1:]))
            x_B = draw(q_BV, u_BD[:, i])
            tokens.append(x_B)
            if self.confidence:
                limit_B = limit_B + going_B
                going_B = going_B & (q_BV.gather(1, x_B[:, None])[:, 0] >= self.confidence)
                if not bool(going_B.any()):
                    break
            if i + 1 < D:
                drawn = zip(nodes, x_B.tolist(), strict=True)
                nodes = [self.table.step(here, x) for here, x in drawn]
        tokens_BN = torch.stack(tokens, 1)
        mask_BN = _within(tokens_BN, limit_B if self.confidence else None, budget.tokens_B)
        return Draft.chain(tokens_BN, mask_BN, probs_BNV[:, : len(tokens)], "iid")

    def _write_distribution(self, q_BV: Tensor, nodes: list[list[int]], prefix: Prefix) -> None:
        """Writes the distribution of the next token as the requests ask for it."""
        distribution, width = prefix.context.distribution, self.table.about.num_tokens
        own = (
            isinstance(distribution, Warp) and distribution.is_softmax and width <= self.num_tokens
        )
        in_place = own and q_BV.device.type == "cpu"
        rows_BV = q_BV[:, :width] if in_place else q_BV.new_empty(len(nodes), width, device="cpu")
        for row_V, here in zip(rows_BV.numpy(), nodes, strict=True):
            self.table.distribution(here, row_V)
        if in_place:
            q_BV /= q_BV.sum(1, keepdim=True)  # rounding apart, they sum to one already
            return
        logits_BV = fitted(rows_BV.log_().to(q_BV.device), self.num_tokens)
        q_BV.copy_(distribution(logits_BV[:, None], prefix)[:, 0])


def _tails(context: Context, num: int) -> list[list[int]]:
    """The last so many tokens of each row, fewer where it has fewer, on the host."""
    lengths = context.lengths
    if min(lengths) == max(lengths):  # as one row alone is: a slice does
        num = min(num, lengths[0])
        return context.tokens_BT.narrow(1, lengths[0] - num, num).tolist()
    places = [[max(n - k, 0) for k in range(num, 0, -1)] for n in lengths]
    rows = context.tokens_BT.gather(1, torch.tensor(places, device=context.device)).tolist()
    return [row[max(0, num - n) :] for row, n in zip(rows, lengths, strict=True)]


def _within(tokens_BN: Tensor, *limits: Tensor | None) -> Tensor:
    """Which nodes exist: of a row's drafted tokens, no more than each of the limits, (B,)."""
    mask_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
    for limit_B in limits:
        if limit_B is not None:
            node_N = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
            mask_BN = mask_BN & (node_N <= limit_B[:, None])
    return mask_BN


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """A name for a tokenizer's mapping from tokens to ids."""
    listed = json.dumps(sorted(vocabulary.items(), key=lambda item: item[1]))
    return hashlib.sha256(listed.encode()).hexdigest()[:32]


def check_vocabulary(table: NgramTable, file: str, target: HFModel) -> None:
    """Raises VocabularyMismatchError unless the table's ids mean to the target what they say."""
    ours, theirs = table.about, target.tokenizer
    if theirs is not None and ours.vocabulary:
        same = ours.vocabulary == vocabulary_digest(theirs.get_vocab())
    else:
        same = ours.num_tokens == target.num_tokens
    if not same:
        width = target.num_tokens if theirs is None else len(theirs)
        raise VocabularyMismatchError(
            f"n-gram file {file!r} counts tokens of another vocabulary ({ours.num_tokens} tokens, "
            f"the target has {width}): build one with `outrider ngram build --target MODEL`"
        )
