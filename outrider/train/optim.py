"""The optimiser and its schedule.

Matrices inside the layers are updated by Muon (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/) with the update scaled to AdamW's root mean square
(Liu et al. 2025, https://arxiv.org/abs/2502.16982), so that one learning rate serves both;
embeddings and norms by AdamW.  The schedule is warm-up, constant, linear decay to zero ("WSD",
Hu et al. 2024, https://arxiv.org/abs/2404.06395).  Its constant part does not depend on the length
of the run, so a run can be extended or ended early from any checkpoint.  With a cosine for the
decay, and no constant part, it is that of Loshchilov and Hutter (2017,
https://arxiv.org/abs/1608.03983).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import AdamW, Muon, Optimizer

HEADS = ("lm_head", "embed_out")
"""Names of output heads, which Muon must not update; nor must it update lookup tables."""

Decay = Literal["linear", "cosine"]
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a pure function of the step.  All counts are steps.

    Attributes:
        learning_rate: the highest.
        steps: of the run.
        warmup_steps: the first ones, over which it rises from zero.
        decay_steps: the last ones, over which it falls to zero.
        decay: whether it falls along a line or along half a period of a cosine.
    """

    learning_rate: float
    steps: int
    warmup_steps: int = 0
    decay_steps: int = 0
    decay: Decay = "linear"

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"learning rate is {self.learning_rate}; it must be a finite number above zero"
            )
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"{self.warmup_steps} warm-up and {self.decay_steps} decay steps do not fit into "
                f"{self.steps} steps; lower them or raise the steps"
            )

    def __call__(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        left = min(1.0, (self.steps - step) / (self.decay_steps + 1))
        decay = left if self.decay == "linear" else (1 - math.cos(math.pi * left)) / 2
        return self.learning_rate * min(warmup, decay)


def build_optimizers(
    model: torch.nn.Module, learning_rate: float, weight_decay: float = 0.1
) -> list[Optimizer]:
    """Muon for the layers' matrices, AdamW for everything else."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    tables = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        is_head = any(head in name for head in HEADS)
        is_matrix = parameter.ndim == 2 and id(parameter) not in tables and not is_head
        (matrices if is_matrix else others).append(parameter)
    return [
        Muon(
            matrices,
            lr=learning_rate,
            weight_decay=weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def build_adamw(model: torch.nn.Module, learning_rate: float) -> list[Optimizer]:
    """AdamW for all parameters.

    It takes more steps than Muon, but each is far cheaper if matrices are small and the processor
    is slow in bfloat16, in which Muon orthogonalises.
    """
    return [AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)]


OPTIMIZERS: dict[OptimizerName, Callable[[torch.nn.Module, float], list[Optimizer]]] = {
    "adamw": build_adamw,
    "muon": build_optimizers,
}


def set_learning_rate(optimizers: list[Optimizer], learning_rate: float) -> None:
    """Sets the learning rate of all parameter groups in place."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
