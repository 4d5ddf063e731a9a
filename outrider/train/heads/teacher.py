"""The target's distribution over a head's draft vocabulary, from its cached final hidden states.

    p(x)      = exp(z_x - log Z),   z_x the output layer's row of x times the final hidden state
    mass      = Σ_x p(x) over the draft vocabulary
    teacher   = p / mass there

Weighting a divergence from the teacher by the mass gives, for forward KL, the gradient of KL(p‖q)
over the whole vocabulary: Σ_x p(x) log q(x) only has terms where q is not zero.

Legend: N positions, D draft vocabulary, H width of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.runtime import HFModel
from outrider.train.fused_linear_loss import chunk_size, product_dtype
from outrider.train.heads.states import output_layer


class Teacher:
    """The frozen output layer, cut to a draft vocabulary.

    Args:
        target: the model.
        vocabulary: the draft vocabulary.

    Attributes:
        weight_DH, bias_D: in the target's dtype.
    """

    def __init__(self, target: HFModel, vocabulary: DraftVocabulary) -> None:
        weight_VH, bias_V = output_layer(target)
        ids_D = vocabulary.target_ids_D.to(weight_VH.device)
        self.weight_DH = weight_VH.detach()[ids_D]
        self.bias_D = None if bias_V is None else bias_V.detach()[ids_D]
        self._cast: dict[torch.dtype, tuple[Tensor, Tensor | None]] = {}

    @torch.no_grad()
    def logits(self, final_NH: Tensor) -> Tensor:
        """The target's logits over the draft vocabulary, (N, D)."""
        return self.outputs(final_NH)

    def outputs(self, hidden_NH: Tensor) -> Tensor:
        """The frozen layer's outputs, (N, D), which can be differentiated in its inputs."""
        dtype = product_dtype(hidden_NH)
        if dtype not in self._cast:
            bias_D = None if self.bias_D is None else self.bias_D.to(dtype)
            self._cast[dtype] = self.weight_DH.to(dtype), bias_D
        return functional.linear(hidden_NH.to(dtype), *self._cast[dtype])

    @torch.no_grad()
    def mass(self, logits_ND: Tensor, log_norm_N: Tensor) -> Tensor:
        """The target's probability of the draft vocabulary, (N,)."""
        return (logits_ND.float().logsumexp(-1) - log_norm_N).exp().clamp(max=1.0)

    @torch.no_grad()
    def mass_after(self, final_NH: Tensor, log_norm_N: Tensor) -> Tensor:
        """The same from final hidden states, a few positions at a time, so that the logits stay in
        the processor's cache."""
        size = chunk_size(len(self.weight_DH), final_NH.device)
        parts = zip(final_NH.split(size), log_norm_N.split(size), strict=True)
        return torch.cat([self.mass(self.logits(h_CH), log_norm_C) for h_CH, log_norm_C in parts])
