"""From a model's logits to the distribution that is sampled from.

    bias, penalties, processors, forced -> z / T -> top-k -> softmax -> top-p -> min-p

applied identically to draft and target, per row and per drafted place, in float32 (float64 for
float64 models). Temperature 0 is a branch: the point mass at the argmax.

Legend: B rows, M places, V vocabulary, K drafted tokens, F forced tokens of a row.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from outrider.core import Prefix, argmax
from outrider.core.errors import InvalidParameterError
from outrider.sampling.params import Sampling
from outrider.sampling.reachable import reachable_positions
from outrider.sampling.truncate import column, keep_min_p, keep_top_k, keep_top_p


class Warp:
    """The distributions of a batch's rows (a ``core.Distribution``); immutable, rebuilt when rows
    come and go.

    Args:
        samplings: one per row.
        num_tokens: size of the vocabulary, the logits' width.
        device: where the logits live.

    Attributes:
        samplings: as given, defaults filled in.
        keeps_logits: whether :meth:`logits` changes none, whatever precedes.
        only_scales: whether the distributions are the softmax of logits ÷ temperature, whatever
            precedes.
        is_softmax: the same at temperature 1.
    """

    def __init__(
        self, samplings: Sequence[Sampling], num_tokens: int, device: torch.device | str = "cpu"
    ) -> None:
        self.samplings = samplings = tuple(sampling.with_defaults() for sampling in samplings)
        self._num_tokens = num_tokens
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
        self._forced_BF2 = self._forced() if any(s.forced for s in samplings) else None
        self.keeps_logits = not (
            self._penalises
            or self._processes
            or self._bias_BV is not None
            or self._forced_BF2 is not None
        )
        truncates = any(self._top_k) or any(p < 1 for p in self._top_p) or any(self._min_p)
        self.only_scales = self.keeps_logits and not (self._any_greedy or truncates)
        self.is_softmax = self.only_scales and not self._scales

    def of_rows(self, rows: Sequence[int]) -> "Warp":
        """The distributions of some rows."""
        samplings = [self.samplings[row] for row in rows]
        return Warp(samplings, self._num_tokens, self._device)

    @cached_property
    def temperature_B(self) -> Tensor:
        """Of the rows, in float32; 1 for greedy ones."""
        return column(tuple(self._temperature), torch.float32, self._device)

    def logits(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        """Logits after bias, penalties, user processors and forced tokens, at least float32.

        Where these leave no token, or make a logit NaN or infinite, all logits are 0, and
        ``prefix.dead_BM`` says so.
        """
        z_BMV = self.raw_logits(logits_BMV, prefix)
        return z_BMV if self.keeps_logits else _without_dead_ends(z_BMV, prefix)

    def raw_logits(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        """The same, whatever bias, penalties and processors leave."""
        z_BMV = logits_BMV.to(torch.promote_types(logits_BMV.dtype, torch.float32))
        if self._bias_BV is not None:
            z_BMV = z_BMV + self._bias_BV[:, None].to(z_BMV.dtype)
        if self._penalises:
            z_BMV = self._penalise(z_BMV, prefix)
        if self._processes:
            z_BMV = self._process(z_BMV, prefix)
        if self._forced_BF2 is not None:
            z_BMV = _force(z_BMV, self._forced_BF2, prefix)
        return z_BMV

    def __call__(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        """The distribution at every place; rows sum to one."""
        z_BMV = self.logits(logits_BMV, prefix)
        if self.greedy:
            return _point_mass(z_BMV)
        p_BMV = self._truncated(z_BMV)
        if self._any_greedy:
            p_BMV = torch.where(self._greedy_B[:, None, None], _point_mass(z_BMV), p_BMV)
        return p_BMV

    def _truncated(self, z_BMV: Tensor) -> Tensor:
        if self._scales:
            z_BMV = z_BMV / self._column(self._temperature, z_BMV)
            if not self.keeps_logits:  # a bias of 1e38 is finite until it is divided
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
        """The kept part of the distribution. Rows that are off stay as they are, to the last bit,
        so that no row depends on what its batch-mates ask for."""
        kept_BMV = p_BMV.masked_fill(~keep_BMV, 0.0)
        kept_BMV = kept_BMV / kept_BMV.sum(-1, keepdim=True)
        if all(on_rows):
            return kept_BMV
        on_B = column(tuple(on_rows), torch.bool, self._device)
        return torch.where(on_B[:, None, None], kept_BMV, p_BMV)

    def _penalise(self, z_BMV: Tensor, prefix: Prefix) -> Tensor:
        """Repetition counts prompt and output, presence and frequency the output only."""
        prompt_BV, output_BV = _counts(prefix, self._num_tokens)
        drafted_BMV = torch.zeros_like(z_BMV)
        index_BMK = prefix.tokens_BK[:, None].expand(prefix.on_path_BMK.shape)
        drafted_BMV.scatter_add_(2, index_BMK, prefix.on_path_BMK.to(z_BMV.dtype))
        output_BMV = drafted_BMV + output_BV[:, None]
        seen_BMV = (output_BMV > 0) | (prompt_BV > 0)[:, None]
        repetition_B = self._column(self._repetition, z_BMV)
        z_BMV = torch.where(
            seen_BMV, torch.where(z_BMV > 0, z_BMV / repetition_B, z_BMV * repetition_B), z_BMV
        )
        presence_B = self._column([s.presence_penalty for s in self.samplings], z_BMV)
        frequency_B = self._column([s.frequency_penalty for s in self.samplings], z_BMV)
        return z_BMV - presence_B * (output_BMV > 0) - frequency_B * output_BMV

    def _process(self, z_BMV: Tensor, prefix: Prefix) -> Tensor:
        """User processors see one place at a time, as ``transformers`` would show it to them, and
        no place that plain decoding could not come to. There the logits stay as they are: no token
        of a sequence is ever drawn from them."""
        z_BMV = z_BMV.clone()
        places = reachable_positions(self.samplings, prefix, z_BMV)
        for b, m in places:
            input_ids = prefix.row(b, m)
            for processor in self.samplings[b].processors:
                z_BMV[b, m] = processor(input_ids, z_BMV[b, m][None])[0]
        return z_BMV

    def _column(self, values: Sequence[float], like: Tensor) -> Tensor:
        """A number per row, to compute with logits of that dtype."""
        return column(tuple(values), like.dtype, self._device)[:, None, None]

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
        """Pairs of a place in the output and the token that stands there; -1 pads."""
        pairs = [list(s.forced.items()) for s in self.samplings]
        for place, token in chain.from_iterable(pairs):
            if token >= self._num_tokens:
                raise InvalidParameterError(
                    f"forced={ {place: token} }: token ids go up to {self._num_tokens - 1}"
                )
        most = max(map(len, pairs))
        padded = [row + [(-1, -1)] * (most - len(row)) for row in pairs]
        return torch.tensor(padded, device=self._device)


def _counts(prefix: Prefix, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Occurrences of each token in prompt and in output, both (B, V)."""
    context = prefix.context
    place_T = torch.arange(context.tokens_BT.shape[1], device=context.device)
    in_prompt_BT = place_T < context.prompt_length_B[:, None]
    in_output_BT = (place_T < context.length_B[:, None]) & ~in_prompt_BT
    zeros_BV = torch.zeros(context.num_rows, num_tokens, device=context.device)
    tokens_BT = context.tokens_BT.clamp(max=num_tokens - 1)
    return (
        zeros_BV.scatter_add(1, tokens_BT, in_prompt_BT.float()),
        zeros_BV.scatter_add(1, tokens_BT, in_output_BT.float()),
    )


def _force(z_BMV: Tensor, forced_BF2: Tensor, prefix: Prefix) -> Tensor:
    """At a forced place its token has logit 0, all others have none."""
    context = prefix.context
    output_B = context.length_B - context.prompt_length_B
    place_BM = output_B[:, None] + prefix.on_path_BMK.sum(2)
    place_BF, token_BF = forced_BF2.unbind(2)
    hit_BMF = place_BM[..., None] == place_BF[:, None]
    token_BM1 = torch.where(hit_BMF, token_BF[:, None], -1).amax(2, keepdim=True)
    only_BMV = torch.full_like(z_BMV, -torch.inf).scatter(2, token_BM1.clamp(min=0), 0.0)
    return torch.where(token_BM1 < 0, z_BMV, only_BMV)


def _without_dead_ends(z_BMV: Tensor, prefix: Prefix) -> Tensor:
    """Uniform logits wherever there is no greatest finite one; marks these places."""
    dead_BM = ~z_BMV.amax(-1).isfinite()
    prefix.dead_BM = dead_BM
    if dead_BM.device.type == "cpu" and not dead_BM.any():
        return z_BMV
    return z_BMV.masked_fill(dead_BM[..., None], 0.0)


def _point_mass(z_BMV: Tensor) -> Tensor:
    return torch.zeros_like(z_BMV).scatter_(-1, argmax(z_BMV)[..., None], 1.0)
