"""An EAGLE-3 head drafts from the target's hidden states, as a small draft model would.

Li, Wei, Zhang and Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025. https://arxiv.org/abs/2503.01840. ``eagle3_network.py`` has the equations
of the network.

    slot t of the head's cache holds (feature of x_t, embedding of x_t+1); its output predicts x_t+2

So the head's cache has one token less than the context, and the first token of a draft takes no
pass of the head: the root was read with the target's last hidden state. After each round the head
reads the accepted tokens and the next token with the target's hidden states; the slots of drafted
tokens, which hold the head's own features, are overwritten.

A row about whose tokens the head has been told nothing (a prompt of one token, in its first round)
drafts nothing. A head that was told of a part of the tokens drafts from that part: positions only
matter by their differences.

The head appears to its drafters as a draft model (``eagle3_model.py``): chains, static trees
(``TreeDrafter``) and dynamic trees as in EAGLE-2 (``DynamicTreeDrafter``) are those of draft
models.

Legend: B rows, N tokens, K emitted tokens, H width of the head, F width of the target times the
layers read, V vocabulary of the target.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.core import (
    Acceptance,
    Budget,
    Capabilities,
    Context,
    Draft,
    Lengths,
    Scores,
    Stream,
)
from outrider.drafters.chain.fused_model import FusedModelDrafter
from outrider.drafters.chain.model import ModelBacked, ModelState
from outrider.drafters.heads.eagle3_model import Eagle3Head, Eagle3Model, FeatureCache
from outrider.drafters.tree.dynamic import DynamicTreeDrafter
from outrider.drafters.tree.static import TreeDrafter
from outrider.runtime import HFModel
from outrider.runtime.prefill import Prefilling

__all__ = [
    "Eagle3Drafter",
    "Eagle3DynamicTreeDrafter",
    "Eagle3Head",
    "Eagle3Model",
    "Eagle3TreeDrafter",
]


class Eagle3State(ModelState):
    """The head's cache."""

    def __init__(self, cache: FeatureCache) -> None:
        super().__init__(cache)
        self.features = cache


if TYPE_CHECKING:

    class _Base(ModelBacked):
        def propose(
            self, state: ModelState, context: Context, budget: Budget, rng: Stream
        ) -> Draft:
            """The drafter that :class:`OnHiddenStates` is mixed into."""
            raise NotImplementedError

else:
    _Base = object


class OnHiddenStates(_Base):
    """What drafters with a head do in another way than those with a draft model: the head's cache
    follows the target's hidden states. Mixed into a drafter of ``ModelBacked``."""

    model: Eagle3Model

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        layers = self.model.head.target_layers
        return replace(super().capabilities, hidden_layers=layers, rewindable=False)

    def begin(self, context: Context) -> Prefilling:
        return Prefilling(Eagle3State(self.model.start(context)))

    def read_prompt(
        self, state: Eagle3State, context: Context, hidden_BNH: Tensor, first: int
    ) -> None:
        """Reads the next tokens of the prompts with the target's hidden states before them.

        Args:
            state: mutated.
            context: the prompts.
            hidden_BNH: the target's hidden states at tokens ``first``, ``first + 1``, … of each
                row; arbitrary where a row's root follows.
            first: as many tokens as were handed over before.
        """
        cache, N = state.features, hidden_BNH.shape[1]
        tokens_BN = context.tokens_BT[:, first + 1 : first + 1 + N]
        output_BNH = self.model.read(cache, tokens_BN, hidden_BNH)
        last_B = context.length_B - 2 - first
        ends_here_B = (last_B >= 0) & (last_B < N)
        at_B = last_B.clamp(0, N - 1)[:, None, None]
        output_BH = output_BNH.gather(1, at_B.expand(-1, 1, output_BNH.shape[2]))[:, 0]
        cache.last_BH = torch.where(ends_here_B[:, None], output_BH, cache.last_BH)
        cache.append(N)
        cache.base = cache.sequence_lengths

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        assert isinstance(state, Eagle3State)
        cache = state.features
        cache.forget_draft(context.sequence_lengths - 1)
        return super().propose(state, context, _where_known(budget, cache.base), rng)

    def commit(self, state: ModelState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Reads the emitted tokens with the target's hidden states at the root and the accepted
        tokens."""
        assert isinstance(state, Eagle3State)
        assert scores.hidden_BNH is not None
        cache, emitted = state.features, verdict.num_emitted
        cache.forget_draft(cache.context.sequence_lengths - 1)
        K, F = max(emitted.host), scores.hidden_BNH.shape[2]
        root_B1 = torch.zeros_like(draft.tokens_BN[:, :1])
        node_BK = torch.cat([root_B1, verdict.path_BD[:, : K - 1]], 1)
        hidden_BKF = scores.hidden_BNH.gather(1, node_BK[..., None].expand(-1, -1, F))
        output_BKH = self.model.read(cache, verdict.emitted(draft)[:, :K], hidden_BKF)
        last_B11 = (emitted.device_B - 1)[:, None, None]
        cache.last_BH = output_BKH.gather(1, last_B11.expand(-1, 1, output_BKH.shape[2]))[:, 0]
        cache.append(emitted)
        cache.base = cache.sequence_lengths

    def _catch_up(self, state: ModelState, context: Context) -> Tensor:
        """Logits after the root, which the head has read already, (B, V)."""
        assert isinstance(state, Eagle3State)
        cache = state.features
        with self.model.watch:
            return self.model.logits(cache.last_BH[:, None], cache).logits_BNV[:, 0]


class Eagle3Drafter(OnHiddenStates, FusedModelDrafter):
    """Samples a chain from a head; arguments as ``FusedModelDrafter``, whose model is an
    :class:`Eagle3Model`."""

    def _run_program(
        self,
        state: ModelState,
        context: Context,
        temperature_B: Tensor | None,
        u_BD: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """The head has read the root already."""
        γ, root_B1 = self.num_fused, context.root_B[:, None]
        done = self.model.draft(state.cache, root_B1, γ, temperature_B, u_BD)
        if done is not None:
            state.cache.append(γ - 1)  # nobody has read the last token
        return done


class Eagle3TreeDrafter(OnHiddenStates, TreeDrafter):
    """Drafts a tree of fixed shape from a head; arguments as ``TreeDrafter``."""


class Eagle3DynamicTreeDrafter(OnHiddenStates, DynamicTreeDrafter):
    """Drafts a head's tree of most probable nodes, EAGLE-3's own method; arguments as
    ``DynamicTreeDrafter``."""


def _where_known(budget: Budget, committed: Lengths) -> Budget:
    """The budget without the rows about whose tokens the head knows nothing."""
    if min(committed.host):
        return budget
    most_B: Any = budget.max_tokens if budget.tokens_B is None else budget.tokens_B
    return Budget(budget.max_tokens, most_B * (committed.device_B > 0))
