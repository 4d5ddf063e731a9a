"""Drafts from an n-gram model: a table of a corpus's counts in place of a draft model.

The cheapest drafters of Leviathan, Kalman and Matias, ICML 2023 (Table 3: unigrams and bigrams),
and of Spector and Ré, "Accelerating LLM Inference with Staged Speculative Decoding", 2023 (a
trigram model below the draft model). https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2308.04623

    sample:  x_i ~ q_i,   q_i = the request's distribution of  log q( . | x_{i-n+1} … x_{i-1})
    argmax:  x_i = argmax_x q(x | x_{i-n+1} … x_{i-1})

So temperature, truncation and penalties act on the table's distribution as they do on the target's.
Where no row sets any of them, q_i is the table's distribution itself and no logarithm is taken. The
argmax is the table's own, whatever the sampling parameters are; it is stored in the file, so it
costs a few binary searches and no distribution is computed. Batches whose rows are all at
temperature 0 draft the argmax in either case.

The table lives on the host. Each round reads an accelerator once, for the last tokens of the
contexts, and ``sample`` once more per drafted token.

With a ``confidence`` a row stops after a token whose probability (under q_i for ``sample``, in the
table for ``argmax``) is smaller. That token stays in the draft.

Legend: B rows, N nodes (node 0 is the root), V vocabulary.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Capabilities,
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
        table: the n-gram model; its vocabulary must be the target's.
        num_tokens: width of the target's logits; ids beyond the table's vocabulary are not drafted.
        how: ``sample`` from the distribution, or take its ``argmax``.
        confidence: stop a row after a token with a smaller probability; 0 never stops.
        dtype: dtype of the distributions, float32 or float64.

    Raises:
        InvalidParameterError: another ``how``, a confidence outside [0, 1].
    """

    capabilities: Capabilities = Capabilities(rewindable=True)

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
        """Does nothing: drafts depend on the context alone."""

    def join(self, state: NoState, other: NoState) -> None:
        """Nothing to join."""

    def _best(self, tails: list[list[int]], context: Context, budget: Budget) -> Draft:
        γ, table = budget.max_tokens, self.table
        rows, lengths = [], []
        for tail in tails:
            row, nodes, sure = tail[-1:], table.nodes(tail[:-1]), True
            while sure and len(row) <= γ:
                nodes = table.step(nodes, row[-1])
                x = table.best(nodes)
                sure = not self.confidence or table.probability(nodes, x) >= self.confidence
                row.append(x)
            lengths.append(len(row) - 1)
            rows.append(row + [0] * (γ + 1 - len(row)))
        tokens_BN = torch.tensor(rows, device=context.device)
        limit_B = torch.tensor(lengths, device=context.device) if self.confidence else None
        return Draft.chain(tokens_BN, _within(tokens_BN, limit_B, budget.tokens_B), None, "chosen")

    def _sampled(
        self, tails: list[list[int]], context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        γ = budget.max_tokens
        u_BD = rng.uniform(Role.DRAFT, γ)
        nodes = [self.table.nodes(tail) for tail in tails]
        going_B = torch.ones_like(context.length_B, dtype=torch.bool)
        limit_B = torch.zeros_like(context.length_B)
        tokens = [context.root_B]
        probs_BNV = torch.zeros(
            len(tails), γ + 1, self.num_tokens, dtype=self._dtype, device=context.device
        )
        for i in range(γ):
            q_BV = probs_BNV[:, i]
            self._write_distribution(q_BV, nodes, Prefix.of_chain(context, tokens[1:]))
            x_B = draw(q_BV, u_BD[:, i])
            tokens.append(x_B)
            if self.confidence:
                limit_B = limit_B + going_B
                going_B = going_B & (q_BV.gather(1, x_B[:, None])[:, 0] >= self.confidence)
                if not bool(going_B.any()):
                    break
            if i + 1 < γ:
                drawn = zip(nodes, x_B.tolist(), strict=True)
                nodes = [self.table.step(here, x) for here, x in drawn]
        tokens_BN = torch.stack(tokens, 1)
        mask_BN = _within(tokens_BN, limit_B if self.confidence else None, budget.tokens_B)
        return Draft.chain(tokens_BN, mask_BN, probs_BNV[:, : len(tokens)], "iid")

    def _write_distribution(self, q_BV: Tensor, nodes: list[list[int]], prefix: Prefix) -> None:
        """Writes the distribution of the next token under the rows' sampling parameters, (B, V)."""
        distribution, width = prefix.context.distribution, self.table.about.num_tokens
        own = (
            isinstance(distribution, Warp) and distribution.is_softmax and width <= self.num_tokens
        )
        in_place = own and q_BV.device.type == "cpu"
        rows_BV = q_BV[:, :width] if in_place else q_BV.new_empty(len(nodes), width, device="cpu")
        for row_V, here in zip(rows_BV.numpy(), nodes, strict=True):
            self.table.distribution(here, row_V)
        if in_place:
            q_BV /= q_BV.sum(1, keepdim=True)  # only rounding keeps the sums from 1
            return
        logits_BV = fitted(rows_BV.log_().to(q_BV.device), self.num_tokens)
        q_BV.copy_(distribution(logits_BV[:, None], prefix)[:, 0])


def _tails(context: Context, num: int) -> list[list[int]]:
    """The last ``num`` tokens of each row on the host; all of them where a row has fewer."""
    lengths = context.lengths
    if min(lengths) == max(lengths):  # a slice will do, as for one row alone
        num = min(num, lengths[0])
        return context.tokens_BT.narrow(1, lengths[0] - num, num).tolist()
    positions = [[max(n - k, 0) for k in range(num, 0, -1)] for n in lengths]
    rows = context.tokens_BT.gather(1, torch.tensor(positions, device=context.device)).tolist()
    return [row[max(0, num - n) :] for row, n in zip(rows, lengths, strict=True)]


def _within(tokens_BN: Tensor, *limits: Tensor | None) -> Tensor:
    """Which nodes exist, (B, N): each of the limits, (B,), bounds a row's drafted tokens."""
    mask_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
    for limit_B in limits:
        if limit_B is not None:
            node_N = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
            mask_BN = mask_BN & (node_N <= limit_B[:, None])
    return mask_BN


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """A digest of a tokenizer's mapping from tokens to ids."""
    listed = json.dumps(sorted(vocabulary.items(), key=lambda item: item[1]))
    return hashlib.sha256(listed.encode()).hexdigest()[:32]


def check_vocabulary(table: NgramTable, file: str, target: HFModel) -> None:
    """Raises VocabularyMismatchError unless the table and the target have the same token ids."""
    about, tokenizer = table.about, target.tokenizer
    if tokenizer is not None and about.vocabulary:
        same = about.vocabulary == vocabulary_digest(tokenizer.get_vocab())
    else:
        same = about.num_tokens == target.num_tokens
    if not same:
        width = target.num_tokens if tokenizer is None else len(tokenizer)
        raise VocabularyMismatchError(
            f"n-gram file {file!r} counts tokens of another vocabulary ({about.num_tokens} tokens, "
            f"the target has {width}): build one with `outrider ngram build --target MODEL`"
        )
