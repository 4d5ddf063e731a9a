"""The recurrences of the recurrent layers in ``transformers``: from a state and the inputs of N
tokens to N outputs and the state after the tokens that a row keeps.

Each has its equation, with inputs for which the state stays as it is. A row that keeps fewer than N
tokens gets these inputs for the others, so that rows of a batch may keep different numbers.

    Mamba        S ← exp(Δ A) S + Δ B x                          Δ = 0
    Mamba-2      S ← exp(Δ A) S + Δ B x,  A one number per head  Δ = 0
    delta rule   S ← exp(g) S;  S ← S + β k (v - Sᵀ k)ᵀ          g = 0, β = 0
    RG-LRU       h ← a h + x                                     a = 1, x = 0
    RWKV-4       weighted average of v, weights e^k, decay e^w   k = -∞, w = 0
    mLSTM        C ← f C + i v kᵀ                                f = 1, i = 0

Mamba: Gu and Dao, 2023. Mamba-2: Dao and Gu, ICML 2024. Gated delta rule: Yang et al., ICLR 2025.
RG-LRU: De et al., 2024 (Griffin). RWKV-4: Peng et al., EMNLP 2023. mLSTM: Beck et al., NeurIPS
2024.

For Mamba-2, the delta rule and mLSTM the model's own function for several tokens computes the
recurrence; for a few tokens of Mamba-2, fewer operations do (:func:`short_scan`). The function of
Mamba (``transformers`` 5.23) begins with an empty state whatever the cache holds, and the layers of
RG-LRU forget their convolution: these are computed here, token by token.

Legend: B rows, N query tokens, C channels, H heads, S state size, P width of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.runtime.kv_cache.recurrence import State, beyond

MOST_SHORT = 16
"""Most tokens of a short scan: rounds have so many, and prefills more."""

_SHORTEST_CHUNK = 16
_CLOSED, _OPEN = -6e4, 6e4  # gates before their exponential or sigmoid, within float16


@dataclass(frozen=True)
class SelectiveScan:
    """Mamba. Inputs: x (B, C, N), Δ (B, C, N), and B and C (B, S, N).

    Attributes:
        A: (C, S).
    """

    A: Tensor
    fill: tuple[float, ...] = (0.0,)

    def empty(self, inputs: Sequence[Tensor]) -> State:
        x_BCN = inputs[0]
        return (x_BCN.new_zeros(*x_BCN.shape[:2], self.A.shape[1], dtype=torch.float32),)

    def run(
        self, state: State, inputs: Sequence[Tensor], kept_B: Tensor | None
    ) -> tuple[Tensor, State]:
        x_BCN, step_BCN, in_BSN, out_BSN = inputs
        if kept_B is not None:
            step_BCN = step_BCN.masked_fill(beyond(kept_B, step_BCN.shape[2])[:, None], 0)
        decay_BCNS = torch.exp(self.A[None, :, None] * step_BCN[..., None])
        added_BCNS = (
            step_BCN[..., None] * in_BSN.transpose(1, 2)[:, None].float() * x_BCN[..., None].float()
        )
        (state_BCS,) = state
        outputs = []
        for decay_BCS, added_BCS, out_BS in zip(
            decay_BCNS.unbind(2), added_BCNS.unbind(2), out_BSN.unbind(2), strict=True
        ):
            state_BCS = decay_BCS * state_BCS + added_BCS
            outputs.append((state_BCS.to(x_BCN.dtype) @ out_BS[..., None])[..., 0])
        return torch.stack(outputs, -1), (state_BCS,)


@dataclass(frozen=True)
class ChunkScan:
    """Mamba-2. Inputs: x (B, N, H, P), Δ (B, N, H), and B and C (B, N, groups, S).

    Attributes:
        kernel: the model's function for several tokens.
        chunk_size: most tokens that it takes at once.
        A: (H,).
        D: what of x is added to the output, (H,).
    """

    kernel: Callable[..., Any]
    chunk_size: int
    A: Tensor
    D: Tensor | None
    fill: tuple[float, ...] = (0.0,)

    def empty(self, inputs: Sequence[Tensor]) -> State:
        x_BNHP, _, in_BNGS, _ = inputs
        B, _, H, P = x_BNHP.shape
        return (x_BNHP.new_zeros(B, H, P, in_BNGS.shape[-1], dtype=torch.float32),)

    def run(
        self, state: State, inputs: Sequence[Tensor], kept_B: Tensor | None
    ) -> tuple[Tensor, State]:
        x_BNHP, step_BNH, in_BNGS, out_BNGS = inputs
        if kept_B is not None:
            step_BNH = step_BNH.masked_fill(beyond(kept_B, step_BNH.shape[1])[..., None], 0)
        if x_BNHP.shape[1] <= MOST_SHORT:
            output, after = short_scan(x_BNHP, step_BNH, self.A, in_BNGS, out_BNGS, state[0])
            if self.D is not None:
                output = output + self.D[:, None] * x_BNHP
            return output, (after,)
        output, after = self.kernel(
            x_BNHP,
            step_BNH,
            self.A,
            in_BNGS,
            out_BNGS,
            chunk_size=_chunk(x_BNHP.shape[1], self.chunk_size),
            D=self.D,
            initial_states=state[0],
            return_final_states=True,
        )
        return output, (after,)


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule, with one decay per head or (KDA) per channel of the keys. Inputs:
    queries, keys and values (B, N, H, ·), g (B, N, H) or (B, N, H, ·), β (B, N, H).

    Attributes:
        kernel: the model's function for several tokens.
        settings: further arguments of it.
    """

    kernel: Callable[..., Any]
    settings: dict[str, Any]
    fill: tuple[float, ...] = (0.0,)

    def empty(self, inputs: Sequence[Tensor]) -> State:
        _, key, value, *_ = inputs
        B, H, P = value.shape[0], value.shape[2], value.shape[3]
        return (value.new_zeros(B, H, key.shape[3], P, dtype=torch.float32),)

    def run(
        self, state: State, inputs: Sequence[Tensor], kept_B: Tensor | None
    ) -> tuple[Tensor, State]:
        query, key, value, decay, beta = inputs
        if kept_B is not None:
            late_BN = beyond(kept_B, beta.shape[1])
            decay = decay.masked_fill(late_BN.view(*late_BN.shape, *[1] * (decay.ndim - 2)), 0)
            beta = beta.masked_fill(late_BN[..., None], 0)
        output, after = self.kernel(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            chunk_size=_chunk(beta.shape[1], 64),
            initial_state=state[0],
            output_final_state=True,
            **self.settings,
        )
        return output, (after.float(),)


@dataclass(frozen=True)
class GatedLinearUnit:
    """RG-LRU. Inputs: x and a, both (B, N, C)."""

    fill: tuple[float, ...] = (0.0,)

    def empty(self, inputs: Sequence[Tensor]) -> State:
        x_BNC = inputs[0]
        return (x_BNC.new_zeros(x_BNC.shape[0], x_BNC.shape[2], dtype=torch.float32),)

    def run(
        self, state: State, inputs: Sequence[Tensor], kept_B: Tensor | None
    ) -> tuple[Tensor, State]:
        x_BNC, decay_BNC = inputs
        if kept_B is not None:
            late_BN1 = beyond(kept_B, x_BNC.shape[1])[..., None]
            x_BNC, decay_BNC = x_BNC.masked_fill(late_BN1, 0), decay_BNC.masked_fill(late_BN1, 1)
        (state_BC,) = state
        outputs = []
        for x_BC, decay_BC in zip(x_BNC.unbind(1), decay_BNC.unbind(1), strict=True):
            state_BC = decay_BC.float() * state_BC + x_BC.float()
            outputs.append(state_BC.to(x_BNC.dtype))
        return torch.stack(outputs, 1), (state_BC,)


@dataclass(frozen=True)
class WeightedAverage:
    """RWKV-4. Inputs: keys and values, (B, N, C). The state is a numerator, a denominator, and the
    logarithm that both are scaled by.

    Attributes:
        time_decay: log(-w), (C,).
        time_first: what is added to the key of the token itself, (C,).
    """

    time_decay: Tensor
    time_first: Tensor
    fill: tuple[float, ...] = (0.0, 0.0, -1e38)

    def empty(self, inputs: Sequence[Tensor]) -> State:
        key_BNC = inputs[0]
        shape = key_BNC.shape[0], key_BNC.shape[2]
        return tuple(key_BNC.new_full(shape, x, dtype=torch.float32) for x in self.fill)

    def run(
        self, state: State, inputs: Sequence[Tensor], kept_B: Tensor | None
    ) -> tuple[Tensor, State]:
        key_BNC, value_BNC = inputs
        decay_C = -torch.exp(self.time_decay)
        outputs, after = [], state
        for i, (key_BC, value_BC) in enumerate(
            zip(key_BNC.float().unbind(1), value_BNC.unbind(1), strict=True)
        ):
            top, bottom = _averaged(after, key_BC + self.time_first, value_BC)[:2]
            outputs.append((top / bottom).to(key_BNC.dtype))
            decayed = (*after[:2], after[2] + decay_C)
            new = _averaged(decayed, key_BC, value_BC)
            if kept_B is not None:
                here_B1 = (i < kept_B)[:, None]
                new = tuple(torch.where(here_B1, *pair) for pair in zip(new, after, strict=True))
            after = new
        return torch.stack(outputs, 1), after


@dataclass(frozen=True)
class MatrixLSTM:
    """mLSTM. Inputs: queries, keys and values (B, H, N, P), input and forget gate (B, H, N) before
    exponential and sigmoid. The state is a matrix and a vector, scaled, and the scale's logarithm.

    Attributes:
        kernel: the layer's backend.
    """

    kernel: Callable[..., Any]
    fill: tuple[float, ...] = (0.0, 0.0, 0.0)

    def empty(self, inputs: Sequence[Tensor]) -> State:
        _, key, value, *_ = inputs
        B, H, _, K = key.shape
        shapes = (B, H, K, value.shape[3]), (B, H, K), (B, H, 1)
        return tuple(key.new_zeros(shape, dtype=torch.float32) for shape in shapes)

    def run(
        self, state: State, inputs: Sequence[Tensor], kept_B: Tensor | None
    ) -> tuple[Tensor, State]:
        query, key, value, in_gate, forget_gate = inputs
        if kept_B is not None:
            late_B1N = beyond(kept_B, key.shape[2])[:, None]
            in_gate = in_gate.masked_fill(late_B1N, _CLOSED)
            forget_gate = forget_gate.masked_fill(late_B1N, _OPEN)
        c, n, m = state
        output, after = self.kernel(
            query=query,
            key=key,
            value=value,
            igate=in_gate,
            fgate=forget_gate,
            c_initial=c,
            n_initial=n,
            m_initial=m,
            mode="inference",
        )
        return output, tuple(after)


def short_scan(
    x_BNHP: Tensor, step_BNH: Tensor, A_H: Tensor, in_BNGS: Tensor, out_BNGS: Tensor, S_BHPS: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba-2 over tokens that share one chunk, in float32: the outputs (B, N, H, P) and the state.
    Dao and Gu, ICML 2024, section 6, with the state before as the only other chunk.

        y_n = Σ_{m ≤ n} e^{a_n - a_m} (C_n · B_m) Δ_m x_m + e^{a_n} C_n S,    a_n = Σ_{m ≤ n} A Δ_m
        S'  = e^{a_N} S + Σ_m e^{a_N - a_m} Δ_m x_m B_mᵀ
    """
    heads = x_BNHP.shape[2] // in_BNGS.shape[2]
    step_BNH = step_BNH.float()
    sum_BHN = (A_H.float() * step_BNH).cumsum(1).transpose(1, 2)
    x_BHNP = (x_BNHP.float() * step_BNH[..., None]).transpose(1, 2)
    in_BHNS = in_BNGS.float().transpose(1, 2).repeat_interleave(heads, 1)
    out_BHNS = out_BNGS.float().transpose(1, 2).repeat_interleave(heads, 1)
    decay_BHNN = (sum_BHN[..., None] - sum_BHN[..., None, :]).exp().tril()
    y_BHNP = (out_BHNS @ in_BHNS.mT * decay_BHNN) @ x_BHNP
    y_BHNP = y_BHNP + sum_BHN.exp()[..., None] * (out_BHNS @ S_BHPS.mT)
    last_BH1 = sum_BHN[..., -1:]
    late_BHNP = x_BHNP * (last_BH1 - sum_BHN).exp()[..., None]
    after_BHPS = last_BH1.exp()[..., None] * S_BHPS + late_BHNP.mT @ in_BHNS
    return y_BHNP.transpose(1, 2).contiguous(), after_BHPS


def _averaged(state: State, key_BC: Tensor, value_BC: Tensor) -> State:
    """A weighted average with one more value, whose weight is e^key."""
    top, bottom, scale = state
    new_scale = torch.maximum(scale, key_BC)
    old, new = torch.exp(scale - new_scale), torch.exp(key_BC - new_scale)
    return old * top + new * value_BC, old * bottom + new, new_scale


def _chunk(num_tokens: int, most: int) -> int:
    """A chunk that holds the tokens: a power of two, since the functions fill chunks up."""
    return min(most, max(_SHORTEST_CHUNK, 1 << (num_tokens - 1).bit_length()))
