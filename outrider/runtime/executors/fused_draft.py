"""A draft as one program: γ forward passes of a model, and the token that each of them leads to.

    x_i ~ truncated(softmax(z_i / T)),   z_i the logits after … x_{i-1},   i = 1 … γ

by the same inverse distribution function as a draft made step by step, or x_i = argmax z_i. No
Python runs between the forward passes. γ is part of the program; all other sizes are symbolic, and
temperature and truncation are inputs.

Legend: B rows, N query tokens of the first forward pass, D drafted tokens (γ), S slots,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from outrider.core import draw
from outrider.core.chain import Choice, draft_chain, with_leaf
from outrider.runtime.attention_metadata import AttentionSpec
from outrider.runtime.executors.traced import ChainForward
from outrider.runtime.executors.traced_cache import ROWS, KVBuffers
from outrider.runtime.kernels.truncation import truncated
from outrider.sampling.penalties import occurrences_in_chain
from outrider.sampling.warp import DraftParameters, draft_distributions

_BEFORE_PARAMETERS = 3
"""Inputs of a sampled draft before its parameters."""


class DraftPlan(Protocol):
    """What is drafted, besides how: a chain of so many tokens, or a tree of some shape. Equal plans
    have the same programs.

    Attributes:
        num_draws: numbers in [0, 1) that a row is drawn with.
        draws: whether sampled rows are drawn; else the best tokens by rank are taken in all rows.
        argmax: whether greedy rows have a program of their own; else all rows take the sampled one.
    """

    @property
    def num_draws(self) -> int: ...
    @property
    def draws(self) -> bool: ...
    @property
    def argmax(self) -> bool: ...

    def __hash__(self) -> int: ...

    def widths(self, *, sampled: bool) -> tuple[int, ...]:
        """Query tokens of each forward pass after the first one, of the sampled program or of the
        greedy one."""

    def programs(
        self, module: nn.Module, spec: AttentionSpec
    ) -> "tuple[GreedyDraft, SampledDraft]":
        """The programs of this draft by a model: the greedy one and the sampled one."""


@dataclass(frozen=True)
class ChainPlan:
    """A chain of ``depth`` (γ) tokens."""

    depth: int
    draws: ClassVar[bool] = True
    argmax: ClassVar[bool] = True

    @property
    def num_draws(self) -> int:
        return self.depth

    def widths(self, *, sampled: bool) -> tuple[int, ...]:
        return (1,) * (self.depth - 1)

    def programs(
        self, module: nn.Module, spec: AttentionSpec
    ) -> "tuple[GreedyDraft, SampledDraft]":
        return GreedyDraft(module, spec, self.depth), SampledDraft(module, spec, self.depth)


class GreedyDraft(ChainForward):
    """The argmax chain.

    Args:
        depth: γ; the others as those of ``ChainForward``.
    """

    kind: ClassVar[str] = "greedy draft"

    def __init__(self, module: nn.Module, spec: AttentionSpec, depth: int) -> None:
        super().__init__(module, spec)
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
        """Logits (B, D + 1, V), the last ones zero; the sum of their health (B,); the chain from
        the root on (B, D + 1)."""
        return self._chain(
            tokens_BN, length_B, (slot_S, keys, values), lambda z_BV, _: (z_BV, z_BV.argmax(-1))
        )

    @property
    def num_later(self) -> int:
        """Query tokens of the forward passes after the first one."""
        return self.depth - 1

    def inputs(
        self, buffers: KVBuffers, rows: int, queries: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        more = self.num_later
        inputs = super().inputs(buffers, rows, queries, span + more, slots + more)
        tokens_BN, length_B, *rest = inputs
        return tokens_BN, length_B - more, *rest

    def roots(self, inputs: Sequence[Any]) -> Tensor:
        """The root of each row of some inputs, (B,)."""
        root_B: Tensor = inputs[0][:, -1]
        return root_B

    def same(self, wanted: Sequence[Tensor], found: Sequence[Tensor]) -> Tensor:
        """After which tokens of two drafts the same is to be recorded, (B, D): after those that
        equal one another, as all before them do."""
        return (wanted[2] == found[2])[:, :-1].cumprod(1).bool()

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        """Whether drafted tokens are among the best of what is recorded of them."""
        chosen_BD = rows_BDV.gather(2, tokens_BD[..., None])[..., 0]
        return torch.equal(chosen_BD, rows_BDV.amax(2))

    def _chain(
        self, tokens_BN: Tensor, length_B: Tensor, rest: Any, choose: Choice
    ) -> tuple[Tensor, Tensor, Tensor]:
        health: list[Tensor] = []

        def step(tokens: Sequence[Tensor]) -> Tensor:
            nonlocal length_B
            queries_BN = tokens[-1][:, None] if health else tokens_BN
            logits_BNV, health_B = super(GreedyDraft, self).forward(queries_BN, length_B, *rest)
            health.append(health_B)
            length_B = length_B + queries_BN.shape[1]
            return logits_BNV[:, -1].to(torch.promote_types(logits_BNV.dtype, torch.float32))

        tokens, recorded = draft_chain(tokens_BN[:, -1], self.depth, step, choose)
        return with_leaf(recorded), torch.stack(health).sum(0), torch.stack(tokens, 1)


class SampledDraft(GreedyDraft):
    """A chain drawn under each row's sampling parameters."""

    kind: ClassVar[str] = "sampled draft"

    @property
    def num_moving(self) -> int:
        return super().num_moving + len(DraftParameters._fields) + 1

    @property
    def num_tokens(self) -> int:
        """Width of the distributions."""
        config: Any = self.module.config
        width: int = config.get_text_config().vocab_size
        return width

    def forward(  # type: ignore[override]
        self,
        tokens_BN: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        parameters: Sequence[Tensor],
        u_BD: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Distributions (B, D + 1, V), the last one zero; the sum of the logits' health (B,); the
        chain from the root on (B, D + 1)."""

        def choose(z_BV: Tensor, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            q_BV = self.after_chain(z_BV, parameters, tokens)
            return q_BV, self.take(q_BV, u_BD, len(tokens) - 1)

        return self._chain(tokens_BN, length_B, (slot_S, keys, values), choose)

    def take(self, q_BV: Tensor, u_BD: Tensor, i: int) -> Tensor:
        """The i-th token, drawn from its distribution, (B,)."""
        return draw(q_BV, u_BD[:, i])

    def inputs(
        self, buffers: KVBuffers, rows: int, queries: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        tokens_BN, length_B, slot_S, *rest = super().inputs(buffers, rows, queries, span, slots)
        u_BD = torch.linspace(0.1, 0.9, rows * self.depth, dtype=torch.float64)
        u_BD = u_BD.view(rows, self.depth).to(length_B.device)
        return tokens_BN, length_B, slot_S, self._example_parameters(length_B), u_BD, *rest

    def sizes(self) -> tuple[Any, ...]:
        return *super().sizes(), [{0: ROWS}] * len(DraftParameters._fields), {0: ROWS}

    def grouped(self, moving: Sequence[Tensor]) -> tuple[Any, ...]:
        first, end = _BEFORE_PARAMETERS, _BEFORE_PARAMETERS + len(DraftParameters._fields)
        return *moving[:first], list(moving[first:end]), *moving[end:]

    def _example_parameters(self, like_B: Tensor) -> list[Tensor]:
        """Penalties and a bias at temperature 1 without truncation, for as many rows on the same
        device: ``DraftParameters`` as a list. Truncation would turn a rounding error of the model
        into another set of tokens."""
        ones_B = torch.ones_like(like_B, dtype=torch.float32)
        zeros_B = torch.zeros_like(like_B)
        index_BV = torch.arange(self.num_tokens, device=like_B.device).repeat(len(like_B), 1)
        return [
            ones_B,
            zeros_B,
            ones_B.clone(),
            zeros_B > 0,
            zeros_B.float(),
            1.2 * ones_B,
            0.3 * ones_B,
            -0.2 * ones_B,
            0.5 * (index_BV % 3),
            index_BV % 5 == 0,
            (index_BV % 7 == 0).float(),
        ]

    def after_chain(
        self, z_BV: Tensor, parameters: Sequence[Tensor], tokens: Sequence[Tensor]
    ) -> Tensor:
        """The distributions after a chain, root first, that the next tokens are drawn from."""
        drafted_BV = occurrences_in_chain(tokens[1:], self.tokens_of(z_BV))
        return self.drawn_from(z_BV[:, None], parameters, drafted_BV[:, None])[:, 0]

    def tokens_of(self, z_BV: Tensor) -> Tensor:
        """The tokens whose logits these are, (V,)."""
        return torch.arange(z_BV.shape[-1], device=z_BV.device)

    def drawn_from(
        self, z_BnV: Tensor, parameters: Sequence[Tensor], drafted_BnV: Tensor
    ) -> Tensor:
        """The distributions that tokens are drawn from, (B, n, V).

        Args:
            z_BnV: logits.
            parameters: ``DraftParameters``.
            drafted_BnV: how often each token has been drafted before each of the n positions.
        """
        return draft_distributions(z_BnV, DraftParameters(*parameters), drafted_BnV, truncated)

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        """Whether drafted tokens are the draws from what is recorded of them."""
        u_BD = inputs[4].to(rows_BDV.device)
        drawn_BD = draw(rows_BDV.flatten(0, 1), u_BD.flatten()).view_as(tokens_BD)
        return torch.equal(drawn_BD, tokens_BD)
