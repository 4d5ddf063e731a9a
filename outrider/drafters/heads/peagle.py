"""P-EAGLE: an EAGLE-3 head that drafts all of its tokens in one forward pass.

Hui, Huang, Salas, Sun, Pemberton, Song, Khetan and Karypis, "P-EAGLE: Parallel-Drafting EAGLE with
Scalable Training", 2026. https://arxiv.org/abs/2602.01469

    cache    slot t holds (hidden states at x_t, embedding of x_t+1), and predicts x_t+2
    pass     the newest tokens, root last, then (mask_hidden, embedding of MASK), G - 1 times
    q_1      from the root's output;   q_i from that of mask i - 1,   i = 2 … G

The network is that of EAGLE-3 (``eagle3_network.py``), attention is causal, and positions go on at
the masks. ``mask_hidden`` stands for the target's hidden states and passes the same norm and
``fc``. No q depends on the tokens drafted before it, in chains as in trees. Nothing of the masks
stays in the cache; committed tokens are read with the target's hidden states in the next pass.

The drafter is that of block heads (``block.py``).

Legend: B rows, K newest tokens, N tokens of the pass, G slots that predict a token, H width of the
head, F width of the target's hidden states side by side, D draft vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import Context, cached_arange
from outrider.core.chain import Step
from outrider.core.health import health_of
from outrider.drafters.heads.eagle3_model import Eagle3Head, Eagle3Model
from outrider.drafters.heads.eagle3_module import HeadModule
from outrider.drafters.heads.fused_draft import Slots
from outrider.drafters.heads.newest import NewestCache
from outrider.drafters.heads.slots import Slots as PredictedSlots
from outrider.runtime.attention_metadata import AttentionSpec


class PEagleHead(Eagle3Head):
    """The weights of a P-EAGLE head; arguments as of ``Eagle3Head``."""

    kind = "peagle"


class SlotOutput(NamedTuple):
    """What the pass computed of the root and the masks.

    Attributes:
        h_BGH: the head's outputs.
        logits_BGD: their logits.
    """

    h_BGH: Tensor
    logits_BGD: Tensor


class PEagleModule(HeadModule):
    """A P-EAGLE head with embeddings and vocabulary; arguments as of ``HeadModule``."""

    def extra_repr(self) -> str:
        """All that a program of it depends on besides its parts (``compile_cache.py``)."""
        config = self.network.config
        return f"{super().extra_repr()}, {config.num_slots} slots of {config.mask_token_id}"

    def num_drafting(self, depth: int) -> int:
        """Masks, however many of them draft."""
        return self.network.config.num_slots - 1

    def with_masks(
        self, tokens_BK: Tensor, hidden_BKF: Tensor, num_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The tokens of the pass, (B, N), and the hidden states before them, (B, N, F): each row's
        first ``num_B`` newest tokens, then masks."""
        mask_token_id, mask_hidden = self.network.config.mask_token_id, self.network.mask_hidden
        assert mask_token_id is not None
        more = self.num_drafting(0)
        N = tokens_BK.shape[1] + more
        is_new_BN = cached_arange(N, tokens_BK.device) < num_B[:, None]
        tokens_BN = torch.where(is_new_BN, pad(tokens_BK, (0, more)), mask_token_id)
        padded_BNF = pad(hidden_BKF, (0, 0, 0, more)).to(mask_hidden.dtype)
        return tokens_BN, torch.where(is_new_BN[..., None], padded_BNF, mask_hidden)

    def slots(self, output_BNH: Tensor, num_B: Tensor) -> SlotOutput:
        """What the outputs of the pass predict."""
        G, H = self.network.config.num_slots, output_BNH.shape[2]
        index_BG = (num_B - 1).clamp(min=0)[:, None] + cached_arange(G, num_B.device)
        h_BGH = output_BNH.gather(1, index_BG[..., None].expand(-1, -1, H))
        return SlotOutput(h_BGH, self.network.logits(h_BGH))

    def begin_draft(
        self,
        spec: AttentionSpec,
        tokens_BK: Tensor,
        hidden_BKF: Tensor,
        num_B: Tensor,
        slots: Slots,
    ) -> tuple[Step, Tensor]:
        """See ``HeadProgram``: one pass."""
        tokens_BN, hidden_BNF = self.with_masks(tokens_BK, hidden_BKF, num_B)
        found = self.slots(self._read(spec, tokens_BN, self.network.fuse(hidden_BNF), slots), num_B)

        def step(tokens: Sequence[Tensor]) -> Tensor:
            return _at_slot(found, len(tokens) - 1)

        return step, found.h_BGH[:, 0]


class PEagleModel(Eagle3Model):
    """A P-EAGLE head bound to its target; arguments as of ``Eagle3Model``.

    Attributes:
        least_known: tokens that a row's cache must hold before it drafts: a prompt of one token has
            no hidden states before its root.
    """

    module_type: ClassVar[type[HeadModule]] = PEagleModule
    least_known: ClassVar[int] = 1

    def predict(self, cache: NewestCache, context: Context, max_tokens: int) -> PredictedSlots:
        """What the drafting pass predicts, slot by slot, of at most so many slots."""
        cache.reread()
        module: Any = self.module
        tokens_BK, hidden_BKF, num = cache.newest
        tokens_BN, hidden_BNF = module.with_masks(tokens_BK, hidden_BKF, num.device_B)
        output_BNH = self.read(cache, tokens_BN, hidden_BNF)
        with self.watch:
            found = module.slots(output_BNH, num.device_B)
        cache.have_read(found.h_BGH[:, 0])
        cache.health.add(self, health_of(found.logits_BGD))
        logits = partial(_at_slot, found)
        vocabulary = None if self.head.vocabulary.is_full else module.vocabulary
        return PredictedSlots(min(found.h_BGH.shape[1], max_tokens), logits, vocabulary)


def _at_slot(found: SlotOutput, slot: int, before_Bn: Tensor | None = None) -> Tensor:
    """The logits of a slot, (B, 1, D), after whatever tokens."""
    return found.logits_BGD[:, slot, None]
