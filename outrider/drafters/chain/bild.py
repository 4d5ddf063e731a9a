"""BiLD's fallback: the small model goes on alone while it is confident.

Kim et al., "Speculative Decoding with Big Little Decoder", NeurIPS 2023, section 3.2.

    call the large model   iff   max_y q(y) < α_FB,  or  N_small tokens are waiting

The token of the step that falls back is not drafted. (Dropping a *drawn* token for its small q
would bias a lossless rule; here tokens are argmaxes, and the rule is lossy anyway.) The first token
of an output is the large model's, as in the authors' code. N_small, 10 there, is
``num_speculative_tokens``.

Legend: B rows, N nodes, D drafted tokens (N-1).
"""

from dataclasses import replace

from torch.nn.functional import pad

from outrider.core import Budget, Context, Draft, Stream
from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.fused_model import FusedModelDrafter
from outrider.drafters.chain.model import ModelState
from outrider.runtime import HFModel


class BildDrafter(FusedModelDrafter):
    """Greedy drafts that end before the first token of low confidence; for temperature 0.

    Args:
        model: the draft model.
        num_tokens: width of the target's logits.
        fallback: α_FB, in [0, 1]. 0 never falls back; 1 always does, unless q(y) = 1.

    Raises:
        InvalidParameterError: a threshold outside [0, 1].
    """

    def __init__(self, model: HFModel, num_tokens: int, fallback: float = 0.6) -> None:
        if not 0 <= fallback <= 1:
            raise InvalidParameterError(f"fallback={fallback!r}: must be in [0, 1]; 0 is never")
        super().__init__(model, num_tokens, fallback, num_fused=1, keep_logits=True)
        self.fallback = fallback

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = super().propose(state, context, budget, rng)
        if draft.num_nodes == 1:
            return draft
        assert draft.logits_BNV is not None, "BiLD decodes greedily"
        begun_B = context.length_B > context.prompt_length_B
        sure_BD = draft.logits_BNV[:, :-1].softmax(-1).amax(-1) >= self.fallback
        keep_BD = sure_BD.long().cumprod(1).bool() & begun_B[:, None]
        return replace(draft, mask_BN=draft.mask_BN & pad(keep_BD, (1, 0), value=True))
