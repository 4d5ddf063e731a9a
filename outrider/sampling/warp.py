"""From a model's logits to the distribution that is sampled from.

    bias, penalties, processors, forced -> z / T -> top-k -> softmax -> top-p -> min-p

applied identically to draft and target, per row and per drafted position, in float32 (float64 for
float64 models). Temperature 0 is a separate branch: the point mass at the argmax.

Legend: B rows, M positions, V vocabulary, K drafted or emitted tokens, T context length, Z forced
tokens of a row, D tokens of a draft vocabulary.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core import Context, Prefix, argmax
from outrider.core.errors import InvalidParameterError
from outrider.sampling.params import Sampling
from outrider.sampling.penalties import Penalties, counts, occurrences, penalised
from outrider.sampling.reachable import reachable_positions
from outrider.sampling.truncate import (
    Truncate,
    Truncation,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    per_row,
    truncated,
)


class RowParameters(NamedTuple):
    """What makes distributions of a batch's logits, as tensors, so that compiled programs depend on
    no values; each (B,).

    Attributes:
        temperature_B: in float32.
        top_k_B, top_p_B, strict_B, min_p_B: as of ``Truncation``.
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    strict_B: Tensor
    min_p_B: Tensor

    @property
    def truncation(self) -> Truncation:
        return Truncation(*self[1:])


class DraftParameters(NamedTuple):
    """What compiled drafts draw with: temperature, truncation, and what changes the logits before
    them, as tensors. Without bias and penalties, the numbers leave the logits unchanged.

    Attributes:
        temperature_B, top_k_B, top_p_B, strict_B, min_p_B: as of ``RowParameters``; greedy rows
            take the best token only.
        repetition_B, presence_B, frequency_B: the penalties.
        bias_BV: added to the logits.
        prompt_BV: which tokens occur in the prompt.
        output_BV: how often each occurs in the output, the draft aside.
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    strict_B: Tensor
    min_p_B: Tensor
    repetition_B: Tensor
    presence_B: Tensor
    frequency_B: Tensor
    bias_BV: Tensor
    prompt_BV: Tensor
    output_BV: Tensor

    @property
    def rows(self) -> RowParameters:
        return RowParameters(*self[: len(RowParameters._fields)])

    @property
    def penalties(self) -> Penalties:
        return Penalties(self.repetition_B, self.presence_B, self.frequency_B)

    def after(self, x_B: Tensor) -> "DraftParameters":
        """Those of the next token, once a token has been drafted."""
        one_B1 = self.output_BV.new_ones(len(x_B), 1)
        return self._replace(output_BV=self.output_BV.scatter_add(1, x_B[:, None], one_B1))

    def among(self, token_D: Tensor) -> "DraftParameters":
        """Those for logits of these tokens only."""
        by_token = {name: getattr(self, name)[:, token_D] for name in _BY_TOKEN}
        return self._replace(**by_token)


_WIDE = torch.float32, torch.float64
_BY_TOKEN = "bias_BV", "prompt_BV", "output_BV"


class Warp:
    """Maps a batch's logits to distributions (a ``core.Distribution``).

    Immutable: the engine builds a new one when rows join or leave.

    Args:
        samplings: the sampling parameters of each row.
        num_tokens: size of the vocabulary, i.e. the width of the logits.
        device: the device of the logits.
        truncate: what restricts the distributions, such as a kernel; None ranks the tokens with
            torch's operators and does no more than the parameters require.

    Attributes:
        samplings: the parameters as given, with defaults filled in.
        keeps_logits: whether :meth:`logits` leaves all logits unchanged, for any prefix.
        fuses: whether the distributions are those of :func:`draft_distributions`, for any prefix,
            so that compiled programs can compute them.
        only_scales: whether they are softmax(logits / temperature), for any prefix.
        is_softmax: whether they are softmax(logits), i.e. the same at temperature 1.
    """

    def __init__(
        self,
        samplings: Sequence[Sampling],
        num_tokens: int,
        device: torch.device | str = "cpu",
        truncate: Truncate | None = None,
    ) -> None:
        distinct = {id(each): each for each in samplings}  # rows often share their parameters
        filled = {key: each.with_defaults() for key, each in distinct.items()}
        self.samplings = samplings = tuple(filled[id(each)] for each in samplings)
        self._num_tokens = num_tokens
        self._truncate = truncate
        self._device = torch.device(device)
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self.greedy = all(s.greedy for s in samplings)
        self._any_greedy = any(s.greedy for s in samplings)
        self._penalises = any(s.penalises for s in samplings)
        self._processes = any(s.processors for s in samplings)
        self._scales = any(s.temperature not in (0, 1) for s in samplings)
        self._temperature = [s.temperature or 1.0 for s in samplings]
        self._greedy_B = torch.tensor([s.greedy for s in samplings], device=device)
        self._top_k = [s.top_k or 0 for s in samplings]
        self._top_p = [s.top_p or 1.0 for s in samplings]
        self._strict = [s.top_p_convention == "paper" for s in samplings]
        self._min_p = [s.min_p or 0.0 for s in samplings]
        self._repetition = [s.repetition_penalty or 1.0 for s in samplings]
        self._bias_BV = self._biases() if any(s.logit_bias for s in samplings) else None
        self._forced_BZ2 = self._forced() if any(s.forced for s in samplings) else None
        self.keeps_logits = not (
            self._penalises
            or self._processes
            or self._bias_BV is not None
            or self._forced_BZ2 is not None
        )
        truncates = any(self._top_k) or any(p < 1 for p in self._top_p) or any(self._min_p)
        self._truncates = truncates
        self.fuses = not (self._processes or self._forced_BZ2 is not None)
        self.only_scales = self.keeps_logits and not self._any_greedy and not truncates
        self.is_softmax = self.only_scales and not self._scales

    def of_rows(self, rows: Sequence[int]) -> "Warp":
        """The warp of a subset of the rows. It is greedy only if that of all rows is: one rule
        verifies them all."""
        samplings = [self.samplings[row] for row in rows]
        part = Warp(samplings, self._num_tokens, self._device, self._truncate)
        part.greedy = self.greedy
        return part

    @cached_property
    def temperature_B(self) -> Tensor:
        """The temperature of each row, in float32; 1 for greedy rows."""
        return per_row(tuple(self._temperature), torch.float32, self._device)

    @cached_property
    def row_parameters(self) -> RowParameters:
        """Temperature and truncation of each row; greedy rows have neither."""
        return self._row_parameters(self._top_k)

    def _row_parameters(self, top_k: Sequence[int]) -> RowParameters:
        truncation = Truncation.of(top_k, self._top_p, self._strict, self._min_p, self._device)
        return RowParameters(self.temperature_B, *truncation)

    def draft_parameters(self, context: Context) -> DraftParameters:
        """What compiled drafts after this context draw with."""
        if not self._penalises:
            return self._unpenalised
        prompt_BV, output_BV = counts(context, self._num_tokens)
        return self._unpenalised._replace(prompt_BV=prompt_BV > 0, output_BV=output_BV)

    @cached_property
    def _unpenalised(self) -> DraftParameters:
        """As :meth:`draft_parameters`, with no occurrences of any token."""
        zeros_BV = torch.zeros(len(self.samplings), self._num_tokens, device=self._device)
        bias_BV = zeros_BV if self._bias_BV is None else self._bias_BV.float()
        penalties = self._penalties(zeros_BV)
        by_token = bias_BV, zeros_BV > 0, zeros_BV
        best_only = [
            1 if each.greedy else top_k
            for each, top_k in zip(self.samplings, self._top_k, strict=True)
        ]
        return DraftParameters(*self._row_parameters(best_only), *penalties, *by_token)

    def logits(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        """The logits after bias, penalties, user processors and forced tokens, at least float32.

        At positions where these leave no token, or make a logit NaN or infinite, all logits become
        0 and ``prefix.dead_BM`` is set.
        """
        z_BMV = self.raw_logits(logits_BMV, prefix)
        return z_BMV if self.keeps_logits else _without_dead_ends(z_BMV, prefix)

    def raw_logits(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        """The same as :meth:`logits`, without the replacement of logits that leave no token."""
        z_BMV = logits_BMV if logits_BMV.dtype in _WIDE else logits_BMV.float()
        if self._bias_BV is not None:
            z_BMV = z_BMV + self._bias_BV[:, None].to(z_BMV.dtype)
        if self._penalises:
            z_BMV = self._penalise(z_BMV, prefix)
        if self._processes:
            z_BMV = self._process(z_BMV, prefix)
        if self._forced_BZ2 is not None:
            z_BMV = _force(z_BMV, self._forced_BZ2, prefix)
        return z_BMV

    def sampling_logits(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        """Logits whose :func:`distributions`, under :attr:`row_parameters`, are those of the rows:
        as :meth:`logits`, with 0 at the argmax of greedy rows and -inf elsewhere."""
        z_BMV = self.logits(logits_BMV, prefix)
        if not self._any_greedy:
            return z_BMV
        return torch.where(self._greedy_B[:, None, None], _point_mass(z_BMV).log(), z_BMV)

    def __call__(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        """The distribution at every position; each sums to one."""
        z_BMV = self.logits(logits_BMV, prefix)
        if self.greedy:
            return _point_mass(z_BMV)
        p_BMV = self._truncated(z_BMV)
        if self._any_greedy:
            p_BMV = torch.where(self._greedy_B[:, None, None], _point_mass(z_BMV), p_BMV)
        return p_BMV

    def _truncated(self, z_BMV: Tensor) -> Tensor:
        if self._truncate is not None and self._truncates:
            return distributions(z_BMV, self.row_parameters, self._truncate)
        if self._scales:
            temperature_B = per_row(tuple(self._temperature), z_BMV.dtype, self._device)
            z_BMV = scaled(z_BMV, temperature_B)
            if not self.keeps_logits:  # a finite bias of 1e38 may overflow here
                z_BMV = z_BMV.clamp(max=torch.finfo(z_BMV.dtype).max)
        if any(self._top_k):
            z_BMV = z_BMV.masked_fill(~keep_top_k(z_BMV, self._top_k), -torch.inf)
        p_BMV = z_BMV.softmax(-1)
        if any(p < 1 for p in self._top_p):
            on_B = [top_p < 1 for top_p in self._top_p]
            p_BMV = self._renormalised(p_BMV, keep_top_p(p_BMV, self._top_p, self._strict), on_B)
        if any(self._min_p):
            on_B = [min_p > 0 for min_p in self._min_p]
            p_BMV = self._renormalised(p_BMV, keep_min_p(p_BMV, self._min_p), on_B)
        return p_BMV

    def _renormalised(self, p_BMV: Tensor, keep_BMV: Tensor, on_rows: Sequence[bool]) -> Tensor:
        """The distribution restricted to the kept tokens. Rows without the parameter stay bitwise
        unchanged, so that no row depends on the parameters of the other rows of the batch."""
        kept_BMV = p_BMV.masked_fill(~keep_BMV, 0.0)
        kept_BMV = kept_BMV / kept_BMV.sum(-1, keepdim=True)
        if all(on_rows):
            return kept_BMV
        on_B = per_row(tuple(on_rows), torch.bool, self._device)
        return torch.where(on_B[:, None, None], kept_BMV, p_BMV)

    def _penalise(self, z_BMV: Tensor, prefix: Prefix) -> Tensor:
        prompt_BV, output_BV = counts(prefix.context, self._num_tokens)
        drafted_BMV = occurrences(prefix.tokens_BK, prefix.on_path_BMK, self._num_tokens)
        output_BMV = (output_BV[:, None] + drafted_BMV).to(z_BMV.dtype)
        return penalised(z_BMV, self._penalties(z_BMV), prompt_BV > 0, output_BMV)

    def _penalties(self, like: Tensor) -> Penalties:
        """The penalties of each row, in the dtype of these logits."""
        return Penalties(
            self._per_row(self._repetition, like),
            self._per_row([s.presence_penalty for s in self.samplings], like),
            self._per_row([s.frequency_penalty for s in self.samplings], like),
        )

    def _process(self, z_BMV: Tensor, prefix: Prefix) -> Tensor:
        """Calls the user processors for one position at a time, as ``transformers`` would.

        Positions that plain decoding cannot reach keep their logits: no token of the output is ever
        sampled there.
        """
        z_BMV = z_BMV.clone()
        for b, m in reachable_positions(self.samplings, prefix, z_BMV):
            input_ids = prefix.row(b, m)
            for processor in self.samplings[b].processors:
                z_BMV[b, m] = processor(input_ids, z_BMV[b, m][None])[0]
        return z_BMV

    def _per_row(self, values: Sequence[float], like: Tensor) -> Tensor:
        """One number per row, in the dtype of these logits, (B,)."""
        return per_row(tuple(values), like.dtype, self._device)

    def _biases(self) -> Tensor:
        bias_BV = torch.zeros(len(self.samplings), self._num_tokens, dtype=self._dtype)
        for b, sampling in enumerate(self.samplings):
            for token, bias in sampling.logit_bias.items():
                if token >= self._num_tokens:
                    raise InvalidParameterError(
                        f"logit_bias={ {token: bias} }: token ids go up to {self._num_tokens - 1}"
                    )
                bias_BV[b, token] = bias
        return bias_BV.to(self._device)

    def _forced(self) -> Tensor:
        """Pairs of an output position and the token forced there, padded with -1."""
        pairs = [list(s.forced.items()) for s in self.samplings]
        for position, token in chain.from_iterable(pairs):
            if token >= self._num_tokens:
                raise InvalidParameterError(
                    f"forced={ {position: token} }: token ids go up to {self._num_tokens - 1}"
                )
        most = max(map(len, pairs))
        padded = [row + [(-1, -1)] * (most - len(row)) for row in pairs]
        return torch.tensor(padded, device=self._device)


def scaled(logits: Tensor, temperature_B: Tensor) -> Tensor:
    """Logits (B, …, V) divided by each row's temperature, in the dtype of the logits."""
    ones = (1,) * (logits.ndim - 1)
    return logits / temperature_B.to(logits.dtype).view(-1, *ones)


def distributions(z_BMV: Tensor, by: RowParameters, truncate: Truncate = truncated) -> Tensor:
    """The distributions of logits under a temperature and truncation per row. Compiled programs
    trace this function.

    Args:
        z_BMV: logits, (B, M, V). A bias of 1e38 may overflow when a temperature below 1 divides
            it; such logits become the largest finite number.
        by: the rows' parameters.
        truncate: what restricts the distributions.
    """
    scaled_BMV = scaled(z_BMV, by.temperature_B).clamp(max=torch.finfo(z_BMV.dtype).max)
    return truncate(scaled_BMV.softmax(-1), by.truncation)


def draft_distributions(
    z_BMV: Tensor, by: DraftParameters, drafted_BMV: Tensor, truncate: Truncate = truncated
) -> Tensor:
    """The distributions of a draft model's logits under all that ``DraftParameters`` say. Compiled
    programs trace this function.

    Args:
        z_BMV: logits, (B, M, V).
        by: the rows' parameters.
        drafted_BMV: how often each token has been drafted before each position.
        truncate: what restricts the distributions.
    """
    return distributions(penalised_logits(z_BMV, by, drafted_BMV), by.rows, truncate)


def penalised_logits(z_BMV: Tensor, by: DraftParameters, drafted_BMV: Tensor) -> Tensor:
    """The logits after bias and penalties; arguments as of :func:`draft_distributions`."""
    z_BMV = z_BMV + by.bias_BV[:, None]
    return penalised(z_BMV, by.penalties, by.prompt_BV, by.output_BV[:, None] + drafted_BMV)


def _force(z_BMV: Tensor, forced_BZ2: Tensor, prefix: Prefix) -> Tensor:
    """At a forced position, gives the forced token logit 0 and all others -inf."""
    context = prefix.context
    output_B = context.length_B - context.prompt_length_B
    position_BM = output_B[:, None] + prefix.on_path_BMK.sum(2)
    position_BZ, token_BZ = forced_BZ2.unbind(2)
    hit_BMZ = position_BM[..., None] == position_BZ[:, None]
    token_BM1 = torch.where(hit_BMZ, token_BZ[:, None], -1).amax(2, keepdim=True)
    only_BMV = torch.full_like(z_BMV, -torch.inf).scatter(2, token_BM1.clamp(min=0), 0.0)
    return torch.where(token_BM1 < 0, z_BMV, only_BMV)


def _without_dead_ends(z_BMV: Tensor, prefix: Prefix) -> Tensor:
    """Makes logits uniform wherever their maximum is not finite, and marks these positions."""
    dead_BM = ~z_BMV.amax(-1).isfinite()
    prefix.dead_BM = dead_BM
    if dead_BM.device.type == "cpu" and not dead_BM.any():
        return z_BMV
    return z_BMV.masked_fill(dead_BM[..., None], 0.0)


def _point_mass(z_BMV: Tensor) -> Tensor:
    return torch.zeros_like(z_BMV).scatter_(-1, argmax(z_BMV)[..., None], 1.0)
