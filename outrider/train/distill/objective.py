"""Objectives of distillation: supervised DistillSpec.

Zhou et al. 2024, https://arxiv.org/abs/2310.08461.  The draft is trained on the target's whole
distribution at every position, not only on its most likely token.  The acceptance α depends on the
whole distribution.  Models are in evaluation mode: dropout in the draft would train another
distribution than the one that drafts.

Shapes: B rows, T tokens of a row (a batch carries T+1), N positions trained on, V vocabulary, C
cells (``cells.py``).  `p` target, `q` draft.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from outrider.train.distill.cells import log_cells
from outrider.train.distill.logits_loss import loss_over_row
from outrider.train.distill.packing import Row, logits_of
from outrider.train.losses import Divergence, Objective, forward_kl

RowObjective = Callable[[Row], Tensor]
"""A row's part of the loss of its batch: the parts of all rows sum to the mean over positions."""


def distillation(
    draft: PreTrainedModel, target: PreTrainedModel, divergence: Divergence = forward_kl
) -> Objective:
    """The mean divergence of the draft from the frozen target over all positions of a batch.

    Freezes the target.
    """
    target.requires_grad_(False).eval()

    def objective(tokens_BT: Tensor) -> Tensor:
        inputs_BT = tokens_BT[:, :-1]
        with torch.no_grad():
            p_logits_BTV = target(input_ids=inputs_BT, use_cache=False).logits
        q_logits_BTV = draft(input_ids=inputs_BT, use_cache=False).logits
        return divergence(p_logits_BTV.flatten(0, 1), q_logits_BTV.flatten(0, 1)).mean()

    return objective


def from_cells(
    draft: PreTrainedModel,
    divergence: Divergence,
    temperature: float,
    width: int,
    compile: bool = False,
) -> RowObjective:
    """The divergence over the target's cells, which the rows carry.

    Args:
        draft: the model to train.
        divergence: of p and q.
        temperature: of decoding, at which the cells were computed.
        width: entries of the vocabulary that target and draft share.
        compile: whether the divergence is compiled, which takes a C++ compiler on a CPU.
    """
    over_row = loss_over_row(draft, width)

    def over_cells(q_logits_CV: Tensor, ids_Ck: Tensor, log_p_CC: Tensor) -> Tensor:
        return divergence(log_p_CC, log_cells(q_logits_CV, ids_Ck, temperature)).sum()

    total = torch.compile(over_cells, dynamic=True) if compile else over_cells

    def objective(row: Row) -> Tensor:
        assert row.cells is not None
        ids_Nk, log_p_NC = row.cells.ids_Nk, row.cells.log_p_NC

        def loss_of(q_logits_CV: Tensor, chunk: slice) -> Tensor:
            return total(q_logits_CV, ids_Nk[chunk], log_p_NC[chunk])

        return over_row(row, loss_of) / row.batch_positions

    return objective


def from_target(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    divergence: Divergence,
    temperature: float,
    width: int,
    compile: bool = False,
) -> RowObjective:
    """The divergence over the whole vocabulary, with a forward pass of the target in each step.

    Arguments as those of :func:`from_cells`.  Freezes the target.
    """
    target.requires_grad_(False).eval()
    over_row = loss_over_row(draft, width)
    compared = torch.compile(divergence, dynamic=True) if compile else divergence

    def objective(row: Row) -> Tensor:
        with torch.no_grad(), torch.autocast(row.tokens_T.device.type, enabled=False):
            p_logits_NV = logits_of(target, row)[:, :width]  # in its own precision, as cached cells

        def loss_of(q_logits_CV: Tensor, chunk: slice) -> Tensor:
            return compared(p_logits_NV[chunk], q_logits_CV, temperature).sum()

        return over_row(row, loss_of) / row.batch_positions

    return objective


def from_labels(draft: PreTrainedModel) -> RowObjective:
    """Cross-entropy with the tokens themselves: training without a target, as a baseline."""
    over_row = loss_over_row(draft)

    def objective(row: Row) -> Tensor:
        def loss_of(logits_CV: Tensor, chunk: slice) -> Tensor:
            labels_C = row.labels_N[chunk]
            return functional.cross_entropy(logits_CV.float(), labels_C, reduction="sum")

        return over_row(row, loss_of) / row.batch_positions

    return objective
