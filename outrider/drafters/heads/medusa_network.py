"""The network of Medusa: heads that each predict one position from one hidden state.

Cai, Li, Geng, Peng, Lee, Chen and Dao, "Medusa: Simple LLM Inference Acceleration Framework with
Multiple Decoding Heads", ICML 2024, section 2.1. https://arxiv.org/abs/2401.10774

    r_0 = h_t,   r_j = r_{j-1} + SiLU(W_j r_{j-1} + b_j),   j = 1 … L
    z_i = U_i r_L                                           i = 1 … the number of heads

h_t is the target's last hidden state at position t, after the final norm: its own output head
predicts x_{t+1} from it, and head i predicts x_{t+1+i}. So with t the token before a round's root,
which is x_{t+1}, head 1 predicts the root's successor, and no head is idle.

W starts at zero and U as the target's output head. (b starts at zero here, so a head starts as the
target's output head exactly; the authors' code leaves b random. That code also repeats one block L
times where the paper has L blocks; files hold all L either way.)

Legend: B rows, … any leading dimensions, H width of the target, D draft vocabulary, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.core.errors import InvalidParameterError


@dataclass(frozen=True)
class MedusaConfig:
    """What Medusa heads are built from.

    Attributes:
        num_heads: how many: the longest draft.
        num_layers: L.
        hidden_size: H.
        num_tokens: V.
        draft_vocab_size: D; V in files that other programs read.
        target_layer: number of the target's last layer, whose output after the final norm is read.

    Raises:
        InvalidParameterError: no head, or a negative number of blocks.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    num_tokens: int
    draft_vocab_size: int
    target_layer: int

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise InvalidParameterError(f"num_heads={self.num_heads}: must be at least 1")
        if self.num_layers < 0:
            raise InvalidParameterError(f"num_layers={self.num_layers}: must be 0 or greater")

    @property
    def target_hidden_size(self) -> int:
        """Width of the hidden state that is read: H."""
        return self.hidden_size

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The layer that is read."""
        return (self.target_layer,)


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``; the identity at first.

    Args:
        width: of x.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + silu(self.linear(x))
        return y


class MedusaNetwork(nn.Module):
    """All heads; parameters are named as in published files.

    Args:
        config: its sizes.
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.medusa_head = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)),
                nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False),
            )
            for _ in range(config.num_heads)
        )

    @torch.no_grad()
    def start_from(self, output_DH: Tensor) -> None:
        """Initialises every head's last layer as the target's output head."""
        for head in self.medusa_head:
            output = cast(nn.Linear, cast(nn.Sequential, head)[-1])
            output.weight.copy_(output_DH)

    def forward(self, hidden_H: Tensor, number: int) -> Tensor:
        """Logits of one head, (…, D).

        Args:
            hidden_H: hidden states, (…, H).
            number: of the head, from 0.
        """
        logits_D: Tensor = self.medusa_head[number](hidden_H)
        return logits_D
