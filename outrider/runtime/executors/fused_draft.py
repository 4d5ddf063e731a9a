"""A whole draft as one program: γ passes of a model, and the token that each of them leads to.

    x_i ~ softmax(z_i / T),   z_i the logits behind … x_{i-1},   i = 1 … γ

by the same inverse distribution function as step by step, or x_i = argmax z_i. No Python runs
between the passes. γ is part of the program, all other sizes are symbolic.

Legend: B rows, N columns fed first, D drafted tokens (γ), S slots, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outrider.core import draw
from outrider.runtime.executors.traced import ROWS, ChainPass, KVBuffers

Choice = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""From logits (B, V) and the place in the draft to what is recorded of them and the token."""


class GreedyDraft(ChainPass):
    """The argmax chain.

    Args:
        depth: γ.
    """

    kind: ClassVar[str] = "greedy draft"

    def __init__(
        self,
        module: nn.Module,
        windows: Mapping[str, int | None],
        limit: int,
        dtype: torch.dtype,
        depth: int,
    ) -> None:
        super().__init__(module, windows, limit, dtype)
        self.depth = depth

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, depth={self.depth}"

    def forward(  # type: ignore[override]
        self,
        tokens_BN: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B, D + 1, V), the last ones zero; their sum (B,); the chain from the root on
        (B, D + 1)."""
        return self._chain(
            tokens_BN, length_B, (slot_S, keys, values), lambda z_BV, _: (z_BV, z_BV.argmax(-1))
        )

    def inputs(
        self, buffers: KVBuffers, rows: int, columns: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        more = self.depth - 1  # slots that the passes behind the first one fill
        inputs = super().inputs(buffers, rows, columns, span + more, slots + more)
        tokens_BN, length_B, *rest = inputs
        return tokens_BN, length_B - more, *rest

    def _chain(
        self, tokens_BN: Tensor, length_B: Tensor, rest: Any, choice: Choice
    ) -> tuple[Tensor, Tensor, Tensor]:
        recorded, chain, sums = [], [tokens_BN[:, -1]], []
        for i in range(self.depth):
            logits_BNV, sum_B = super().forward(tokens_BN, length_B, *rest)
            z_BV = logits_BNV[:, -1].to(torch.promote_types(logits_BNV.dtype, torch.float32))
            row_BV, x_B = choice(z_BV, i)
            recorded.append(row_BV)
            chain.append(x_B)
            sums.append(sum_B)
            length_B = length_B + tokens_BN.shape[1]
            tokens_BN = x_B[:, None]
        recorded.append(torch.zeros_like(recorded[0]))
        return torch.stack(recorded, 1), torch.stack(sums).sum(0), torch.stack(chain, 1)


class SampledDraft(GreedyDraft):
    """A chain drawn at each row's temperature."""

    kind: ClassVar[str] = "sampled draft"

    @property
    def num_moving(self) -> int:
        return super().num_moving + 2

    def forward(  # type: ignore[override]
        self,
        tokens_BN: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        temperature_B: Tensor,
        u_BD: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Distributions (B, D + 1, V), the last one zero; the sum of all logits (B,); the chain
        from the root on (B, D + 1)."""

        def choice(z_BV: Tensor, i: int) -> tuple[Tensor, Tensor]:
            q_BV = (z_BV / temperature_B[:, None]).softmax(-1)
            return q_BV, draw(q_BV, u_BD[:, i])

        return self._chain(tokens_BN, length_B, (slot_S, keys, values), choice)

    def inputs(
        self, buffers: KVBuffers, rows: int, columns: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        tokens_BN, length_B, slot_S, *rest = super().inputs(buffers, rows, columns, span, slots)
        u_BD = torch.linspace(0.1, 0.9, rows * self.depth, dtype=torch.float64)
        u_BD = u_BD.view(rows, self.depth).to(length_B.device)
        return tokens_BN, length_B, slot_S, torch.ones_like(length_B).float(), u_BD, *rest

    def sizes(self) -> tuple[Any, ...]:
        return *super().sizes(), {0: ROWS}, {0: ROWS}
