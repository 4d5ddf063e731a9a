"""What every part of a round may read about the batch: the tokens so far, the sampling
distribution and the random numbers.

Legend: B rows, T context length (capacity), N nodes, K drafted or emitted tokens, M positions,
V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.chain import cached_arange
from outrider.core.draft import Draft
from outrider.core.ends import Ends
from outrider.core.health import Health
from outrider.core.lengths import Lengths, Sequences
from outrider.core.rng import Stream, UpcomingUniforms, row_keys

_SLACK = 128


class Distribution(Protocol):
    """Maps the logits of a batch to the distributions that its rows sample from."""

    @property
    def greedy(self) -> bool:
        """Whether every row takes the argmax, so that no probabilities are needed."""

    def logits(self, logits_BMV: Tensor, prefix: "Prefix") -> Tensor:
        """The logits after bias, penalties and processors, at least float32, shape (B, M, V)."""

    def __call__(self, logits_BMV: Tensor, prefix: "Prefix") -> Tensor:
        """The normalised distribution at every position, shape (B, M, V)."""


@dataclass
class Context(Sequences):
    """Ragged token sequences as a rectangle with lengths; grows by doubling.

    ``length_B`` and ``lengths`` are the tokens per row on the device and on the host; only
    :meth:`append`, :meth:`follow`, :meth:`keep` and :meth:`join` change them.

    Attributes:
        tokens_BT: prompt and output of each row; what lies beyond its length is arbitrary.
        sequence_lengths: tokens per row.
        prompt_length_B: tokens of each row's prompt, on the device.
        key_B: random-number keys of the rows.
        distribution: the sampling distribution of the rows.
        sources: the encoder's input token ids of each row, for encoder-decoder models; the row's
            own tokens are then those of the decoder only. None without an encoder.
        ends: where the rows' sequences end; None if they do not end.
        predictions: the output that the user expects of each row, empty where nothing is
            expected; None if of no row anything is.
        health: whether all logits computed for the batch were finite; the round reads it.
    """

    tokens_BT: Tensor
    sequence_lengths: Lengths
    prompt_length_B: Tensor
    key_B: Tensor
    distribution: Distribution
    sources: list[tuple[int, ...]] | None = None
    ends: Ends | None = None
    predictions: list[tuple[int, ...]] | None = None
    health: Health = field(default_factory=Health, init=False, repr=False)
    _upcoming: UpcomingUniforms | None = field(default=None, init=False, repr=False)
    _host_key_B: Tensor | None = field(default=None, init=False, repr=False)

    @classmethod
    def start(
        cls,
        prompts: Sequence[Sequence[int]],
        distribution: Distribution,
        seeds: Sequence[int],
        requests: Sequence[int],
        device: torch.device | str = "cpu",
        sources: Sequence[Sequence[int]] | None = None,
        ends: Ends | None = None,
        prompt_lengths: Sequence[int] | None = None,
        predictions: Sequence[tuple[int, ...]] | None = None,
    ) -> "Context":
        """A batch of non-empty prompts (token ids), one seed and request number per row, one
        non-empty encoder input where there is an encoder, where the sequences end, and the output
        that is expected of each row.

        Rows that resume have tokens of their output after their prompts; ``prompt_lengths`` then
        says how many tokens are the prompt's."""
        lengths = Lengths.of([len(prompt) for prompt in prompts], device)
        tokens_BT = torch.zeros(len(prompts), max(lengths.host) + _SLACK, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        return cls(
            tokens_BT.to(device),
            lengths,
            lengths.device_B
            if prompt_lengths is None
            else torch.tensor(prompt_lengths, device=device),
            row_keys(list(seeds), list(requests), device),
            distribution,
            None if sources is None else [tuple(source) for source in sources],
            ends,
            None if predictions is None else list(predictions),
        )

    @property
    def device(self) -> torch.device:
        return self.tokens_BT.device

    @property
    def is_even(self) -> bool:
        """Whether all rows have the same length."""
        lengths = self.sequence_lengths.host
        return lengths.count(lengths[0]) == len(lengths)

    @property
    def root_B(self) -> Tensor:
        """The last committed token of each row."""
        if self.is_even:
            return self.tokens_BT[:, self.sequence_lengths.host[0] - 1]
        return self.tokens_BT.gather(1, self.length_B[:, None] - 1)[:, 0]

    @property
    def ended_B(self) -> Tensor:
        """Which rows have an end token in their output. The engine removes rows when they end, but
        the context of a drafter's own nested rounds may run past the end."""
        if self.ends is None:
            return torch.zeros_like(self.length_B, dtype=torch.bool)
        index_T = cached_arange(self.tokens_BT.shape[1], self.device)
        in_output_BT = (index_T >= self.prompt_length_B[:, None]) & (
            index_T < self.length_B[:, None]
        )
        return (in_output_BT & self.ends.are_ends(self.tokens_BT)).any(1)

    @property
    def rng(self) -> Stream:
        """The random numbers of the coming round."""
        here = self.sequence_lengths
        if not UpcomingUniforms.is_faster(self.key_B):
            return Stream(self.key_B, here.device_B)
        precomputed = partial(self._precomputed, here.host)
        on_host = None if self.key_B.is_cpu else partial(self._stream_on_host, here.host)
        return Stream(self.key_B, here.device_B, precomputed=precomputed, on_host=on_host)

    def append(self, emitted_BK: Tensor, num_emitted: Lengths) -> None:
        """Appends the tokens of a round; row b takes its first ``num_emitted``."""
        K, lengths = emitted_BK.shape[1], self.sequence_lengths.host
        first = max(lengths)
        self._reserve(first + K)
        if first == min(lengths):
            self.tokens_BT[:, first : first + K] = emitted_BK
        else:
            index_BK = self.length_B[:, None] + cached_arange(K, self.device)
            self.tokens_BT.scatter_(1, index_BK, emitted_BK)
        self.sequence_lengths = self.sequence_lengths + num_emitted

    def follow(self, tokens_BT: Tensor, lengths: Lengths) -> None:
        """Takes over the tokens of another context of the same rows. ``tokens_BT`` is shared, not
        copied."""
        self.tokens_BT, self.sequence_lengths = tokens_BT, lengths

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in this order. The caller replaces the distribution."""
        index_B = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self._upcoming = self._host_key_B = None
        self.tokens_BT = self.tokens_BT[index_B]
        self.key_B = self.key_B[index_B]
        self.sequence_lengths = self.sequence_lengths.keep(rows)
        self.prompt_length_B = self.prompt_length_B[index_B]
        if self.sources is not None:
            self.sources = [self.sources[row] for row in rows]
        if self.predictions is not None:
            self.predictions = [self.predictions[row] for row in rows]
        if self.ends is not None:
            self.ends = self.ends.keep(rows)

    def join(self, other: "Context") -> None:
        """Appends the rows of another context. The caller replaces the distribution."""
        if self.predictions is not None or other.predictions is not None:
            nothing: tuple[int, ...] = ()
            ours = self.predictions or [nothing] * self.num_rows
            self.predictions = ours + (other.predictions or [nothing] * other.num_rows)
        width = max(self.tokens_BT.shape[1], other.tokens_BT.shape[1])
        self._upcoming = self._host_key_B = None
        self.tokens_BT = torch.cat([_widened(c.tokens_BT, width) for c in (self, other)])
        self.key_B = torch.cat([self.key_B, other.key_B])
        self.sequence_lengths = self.sequence_lengths.join(other.sequence_lengths)
        self.prompt_length_B = torch.cat([self.prompt_length_B, other.prompt_length_B])
        if self.sources is not None and other.sources is not None:
            self.sources = self.sources + other.sources
        if self.ends is not None and other.ends is not None:
            self.ends = self.ends.join(other.ends)

    def _precomputed(self, lengths: list[int], start: int, stop: int) -> Tensor:
        if self._upcoming is None or not self._upcoming.covers(lengths):
            self._upcoming = UpcomingUniforms(self._key_on_host(), lengths, self.device)
        return self._upcoming.at(lengths, start, stop)

    def _stream_on_host(self, lengths: list[int]) -> Stream:
        return Stream(self._key_on_host(), torch.tensor(lengths))

    def _key_on_host(self) -> Tensor:
        if self._host_key_B is None:
            self._host_key_B = self.key_B.cpu()
        return self._host_key_B

    def _reserve(self, num_tokens: int) -> None:
        if num_tokens > self.tokens_BT.shape[1]:
            width = max(num_tokens, 2 * self.tokens_BT.shape[1])
            self.tokens_BT = _widened(self.tokens_BT, width)


def _widened(tokens_BT: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tokens_BT, (0, width - tokens_BT.shape[1]))


class Prefix:
    """The tokens before each of M scored positions: the context, then some drafted tokens.

    Most distributions do not depend on the prefix, so its tensors are computed on first use.

    Args:
        context: the committed tokens.
        tokens: returns ``tokens_BK``, the drafted tokens in order.
        on_path: returns ``on_path_BMK``, whether token k lies on the path to position m.
        exists: returns which positions exist, (B, M); None if all do.
        draft: the draft whose nodes the positions are; None if they are not nodes of a draft.

    Attributes:
        dead_BM: the positions at which the distribution found no token to sample; None if the
            distribution has not reported any. At such positions it returns the uniform
            distribution, so that no rule computes with NaN: only verification shows whether the
            position is reached at all.
    """

    dead_BM: Tensor | None = None

    def __init__(
        self,
        context: Context,
        tokens: Callable[[], Tensor],
        on_path: Callable[[], Tensor],
        exists: Callable[[], Tensor] | None = None,
        draft: Draft | None = None,
    ) -> None:
        self.context = context
        self.draft = draft
        self._tokens = tokens
        self._on_path = on_path
        self._exists = exists

    @classmethod
    def of_draft(cls, context: Context, draft: Draft) -> "Prefix":
        """The prefixes of the nodes of a draft."""
        return cls(
            context,
            lambda: draft.tokens_BN[:, 1:],
            lambda: draft.ancestors_BNN[:, :, 1:],
            lambda: draft.mask_BN,
            draft,
        )

    @classmethod
    def of_chain(
        cls, context: Context, tokens: Sequence[Tensor], exists_B: Tensor | None = None
    ) -> "Prefix":
        """The prefix of the one position after all these tokens, each (B,).

        ``exists_B`` says in which rows the position exists; None means in all.
        """
        B, K = context.num_rows, len(tokens)
        none_B0 = context.tokens_BT[:, :0]
        return cls(
            context,
            lambda: torch.stack(list(tokens), 1) if K else none_B0,
            lambda: torch.ones(B, 1, K, dtype=torch.bool, device=context.device),
            None if exists_B is None else lambda: exists_B[:, None],
        )

    @cached_property
    def tokens_BK(self) -> Tensor:
        return self._tokens()

    @cached_property
    def on_path_BMK(self) -> Tensor:
        return self._on_path()

    @cached_property
    def is_open_BM(self) -> Tensor:
        """Whether plain decoding could sample a token at each position: the position exists, no end
        token precedes it in the output, and the row is below its maximum length."""
        context, on_path_BMK = self.context, self.on_path_BMK
        B, M, _ = on_path_BMK.shape
        open_BM = torch.ones(B, M, dtype=torch.bool, device=context.device)
        if self._exists is not None:
            open_BM = open_BM & self._exists()
        if context.ends is None:
            return open_BM
        ends_BK = context.ends.are_ends(self.tokens_BK)
        ended_BM = context.ended_B[:, None] | (on_path_BMK & ends_BK[:, None]).any(2)
        length_BM = context.length_B[:, None] + on_path_BMK.sum(2)
        return open_BM & ~ended_BM & (length_BM < context.ends.length_B[:, None])

    def row(self, b: int, m: int) -> Tensor:
        """All token ids before position m of row b, shape (1, T)."""
        context = self.context
        committed_T = context.tokens_BT[b, : context.lengths[b]]
        drafted_K = torch.tensor(self.paths[b][m], dtype=torch.int64, device=context.device)
        return torch.cat([committed_T, drafted_K])[None]

    @cached_property
    def paths(self) -> list[list[list[int]]]:
        """The drafted tokens before each position of each row, on the host."""
        rows = zip(self.tokens_BK.tolist(), self.on_path_BMK.tolist(), strict=True)
        return [[list(compress(tokens, path)) for path in paths] for tokens, paths in rows]
