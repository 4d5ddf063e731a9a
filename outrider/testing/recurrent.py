"""A toy recurrent model: the state after a sequence does not contain the state of any shorter one.

A KV cache forgets tokens by moving a counter. A recurrent layer cannot: it has one state per row,
and every token overwrites it. Such a model keeps snapshots, and rolls back to one of them by
replaying the tokens after it. The toy does so with a state of one number per row, and proves that
``core.SequenceState`` has room for such models, as targets and as draft models.

Legend: B rows, N query tokens of a forward pass, D depth, T capacity in tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import gt
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import Acceptance, Context, Draft, Lengths, Scores, Sequences
from outrider.testing.toy import ToyModel

_NUM_SNAPSHOTS = 8


@dataclass(frozen=True)
class RecurrentSnapshot:
    """The state after some sequences.

    Attributes:
        lengths: tokens per row.
        past_B: the number that stands for these tokens.
    """

    lengths: Lengths
    past_B: Tensor


class RecurrentState(Sequences):
    """One number per row that stands for all tokens read: a ``core.SequenceState``.

    Args:
        context: the batch it belongs to.
        read: the number after one more token, from the number before and the token.
    """

    def __init__(self, context: Context, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.context = context
        self._read = read
        zero_B = torch.zeros_like(context.length_B)
        self.sequence_lengths = Lengths([0] * context.num_rows, zero_B)
        self._past_B = zero_B
        self._num_read = [0] * context.num_rows  # tokens that _past_B stands for
        self._tokens_BT = context.tokens_BT[:, :0]
        self._snapshots = [self.snapshot()]

    def run(self, tokens_BN: Tensor, parents_BN: Tensor | None = None) -> Tensor:
        """A forward pass over query tokens after the sequences: the number after each, (B, N).

        Args:
            tokens_BN: the tokens.
            parents_BN: the query token that each one follows, -1 for the sequence; None where each
                query token follows the one before.
        """
        self._snapshots.append(self.snapshot())
        del self._snapshots[1:-_NUM_SNAPSHOTS]  # the first one, of empty sequences, stays
        self._write(tokens_BN)
        rows_B = torch.arange(self.num_rows, device=tokens_BN.device)
        pasts = [self._past_B]
        for i, token_B in enumerate(tokens_BN.unbind(1)):
            above_B = i if parents_BN is None else parents_BN[:, i] + 1
            pasts.append(self._read(torch.stack(pasts, 1)[rows_B, above_B], token_B))
        self._past_B = pasts[-1]
        self._num_read = [n + tokens_BN.shape[1] for n in self.lengths]
        return torch.stack(pasts[1:], 1)

    def append(self, num: Lengths | int) -> None:
        self.sequence_lengths = self.sequence_lengths + num
        self._replay()

    def select(self, index_BD: Tensor, num_accepted: Lengths) -> None:
        from_BN = self.length_B[:, None] + pad(index_BD, (1, 0))  # the root is query token 0
        self._write(self._tokens_BT.gather(1, from_BN))
        self._num_read = [-1] * self.num_rows  # the query tokens in between are not on the path
        self.append(num_accepted + 1)

    def rollback(self, lengths: Lengths) -> None:
        self.sequence_lengths = self.sequence_lengths.at_most(lengths)
        self._replay()

    def snapshot(self) -> RecurrentSnapshot:
        self._replay()
        return RecurrentSnapshot(self.sequence_lengths, self._past_B)

    def restore(self, snapshot: RecurrentSnapshot) -> None:
        self._drop_snapshots(snapshot.lengths)
        self.sequence_lengths, self._past_B = snapshot.lengths, snapshot.past_B
        self._num_read = self.lengths

    def keep(self, rows: Sequence[int]) -> None:
        self._replay()
        index_B = torch.tensor(rows, dtype=torch.int64, device=self._past_B.device)
        self.sequence_lengths = self.sequence_lengths.keep(rows)
        self._past_B, self._tokens_BT = self._past_B[index_B], self._tokens_BT[index_B]
        self._rows_changed()

    def join(self, other: "RecurrentState") -> None:
        self._replay()
        other._replay()
        T = max(self._tokens_BT.shape[1], other._tokens_BT.shape[1])
        both = [pad(each._tokens_BT, (0, T - each._tokens_BT.shape[1])) for each in (self, other)]
        self.sequence_lengths = self.sequence_lengths.join(other.sequence_lengths)
        self._past_B, self._tokens_BT = torch.cat([self._past_B, other._past_B]), torch.cat(both)
        self._rows_changed()

    def _rows_changed(self) -> None:
        self._num_read = self.lengths
        zero_B = torch.zeros_like(self._past_B)
        empty = RecurrentSnapshot(Lengths([0] * self.num_rows, zero_B), zero_B)
        self._snapshots = [empty, self.snapshot()]

    def _write(self, tokens_BN: Tensor) -> None:
        """Records tokens after the sequences, to replay them."""
        N = tokens_BN.shape[1]
        missing = max(self.lengths) + N - self._tokens_BT.shape[1]
        tokens_BT = pad(self._tokens_BT, (0, max(missing, 0)))
        index_BN = self.length_B[:, None] + torch.arange(N, device=tokens_BN.device)
        self._tokens_BT = tokens_BT.scatter(1, index_BN, tokens_BN)

    def _replay(self) -> None:
        """Makes the number stand for the sequences as they are, from the last snapshot that is not
        after any of them."""
        if self._num_read == self.lengths:
            return
        self._drop_snapshots(self.sequence_lengths)
        last = self._snapshots[-1]
        past_B, missing = last.past_B, self.sequence_lengths - last.lengths
        for i in range(max(missing.host)):
            index_B1 = (last.lengths.device_B + i)[:, None].clamp(max=self._tokens_BT.shape[1] - 1)
            read_B = self._read(past_B, self._tokens_BT.gather(1, index_B1)[:, 0])
            past_B = torch.where(i < missing.device_B, read_B, past_B)
        self._past_B, self._num_read = past_B, self.lengths

    def _drop_snapshots(self, lengths: Lengths) -> None:
        """Drops the snapshots of sequences that are longer somewhere."""
        while any(map(gt, self._snapshots[-1].lengths.host, lengths.host)):
            self._snapshots.pop()


@dataclass(frozen=True)
class CompletePrefill:
    """A prefill of which no forward pass is left.

    Attributes:
        cache: the state after it.
        next_width: tokens that the next forward pass reads: none.
    """

    cache: RecurrentState
    next_width: int = 0

    def finish(self) -> RecurrentState:
        """Nothing is left to do; returns the state."""
        return self.cache


@dataclass(frozen=True)
class RecurrentToy:
    """A toy model run as a recurrent one: a ``core.Model``, and what drafters over a model call.

    Attributes:
        toy: its logits, and how it folds tokens into a number.
        decoder_prompt: None, as of every decoder-only model.
    """

    toy: ToyModel
    decoder_prompt: ClassVar[None] = None

    @property
    def num_tokens(self) -> int:
        """Width of the logits."""
        return self.toy.vocab_size

    def start(self, context: Context) -> RecurrentState:
        state = RecurrentState(context, self.toy.read)
        if longest := max(context.lengths) - 1:
            state.run(context.tokens_BT[:, :longest])
            state.append(longest)
            state.rollback(context.sequence_lengths - 1)
        return state

    def begin(self, context: Context) -> CompletePrefill:
        """As :meth:`start`; the whole prompt is read at once."""
        return CompletePrefill(self.start(context))

    def extend(
        self, cache: RecurrentState, tokens_BN: Tensor, nodes: None = None, num_logits: int = 0
    ) -> Tensor:
        """Logits after query tokens that follow one another, (B, N, V); of the last ``num_logits``
        query tokens alone unless that is 0."""
        logits_BNV = self.toy.logits(cache.run(tokens_BN))
        return logits_BNV[:, -num_logits:] if num_logits else logits_BNV

    def score(self, cache: RecurrentState, draft: Draft) -> Scores:
        return Scores(self.toy.logits(cache.run(draft.tokens_BN, draft.parents_BN)))

    def commit(self, cache: RecurrentState, draft: Draft, verdict: Acceptance) -> None:
        if draft.is_chain:
            cache.append(verdict.num_emitted)
        else:
            cache.select(verdict.path_BD, verdict.num_accepted)

    def join(self, cache: RecurrentState, other: RecurrentState) -> None:
        cache.join(other)
