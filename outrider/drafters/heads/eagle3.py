"""An EAGLE-3 head drafts from the target's hidden states, as a small draft model would.

Li, Wei, Zhang and Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025. https://arxiv.org/abs/2503.01840. ``eagle3_network.py`` has the equations
of the network.

    slot t of the head's cache holds (feature of x_t, embedding of x_t+1); its output predicts x_t+2

So the head's cache has one token less than the context. The tokens that a round emitted are read
with the target's hidden states when the next draft begins: that pass leads to the draft's first
token, and each other token takes one pass. The slots of drafted tokens, which hold the head's own
features, are overwritten.

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
from outrider.drafters.chain.stop import Stop
from outrider.drafters.heads.eagle3_model import Eagle3Head, Eagle3Model, FeatureCache
from outrider.drafters.heads.fused_dynamic_tree import HeadDynamicTreePlan
from outrider.drafters.heads.fused_tree import HeadTreePlan
from outrider.drafters.heads.newest import Newest
from outrider.drafters.tree.dynamic import DynamicTreeDrafter
from outrider.drafters.tree.fused import TreePlan
from outrider.drafters.tree.fused_dynamic import DynamicTreePlan
from outrider.drafters.tree.grow import StaticTree
from outrider.drafters.tree.static import TreeDrafter
from outrider.runtime import HFModel
from outrider.runtime.executors.fused_draft import DraftPlan
from outrider.runtime.prefill import Prefilling
from outrider.sampling.warp import DraftParameters

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
        able = replace(super().capabilities, reviews=False, starts_late=False)
        return replace(able, hidden_layers=layers, rewindable=False)

    def begin(self, context: Context) -> Prefilling:
        return Prefilling(Eagle3State(self.model.start(context)))

    def read_prompt(
        self, state: Eagle3State, context: Context, hidden_BNH: Tensor, first: int
    ) -> None:
        """Reads the next tokens of the prompts: see ``Eagle3Model.read_prompt``."""
        self.model.read_prompt(state.features, context, hidden_BNH, first)

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        assert isinstance(state, Eagle3State)
        cache = state.features
        cache.forget_draft()
        return super().propose(state, context, _where_known(budget, cache.known), rng)

    def commit(self, state: ModelState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Keeps the emitted tokens, and the target's hidden states at the root and the accepted
        tokens, to be read."""
        assert isinstance(state, Eagle3State)
        assert scores.hidden_BNH is not None
        cache = state.features
        cache.forget_draft()
        if cache.is_waiting_long:
            self.model.catch_up(cache)
        cache.renew(Newest.emitted(draft, verdict, scores.hidden_BNH))

    def _can_align(self, state: ModelState, context: Context) -> bool:
        """The programs of heads read the newest tokens, however many each row has."""
        return True

    def _run_plan(
        self,
        plan: DraftPlan,
        state: ModelState,
        context: Context,
        parameters: DraftParameters | None,
        u_BR: Tensor | None,
    ) -> tuple[Tensor, ...] | None:
        """The program reads the newest tokens."""
        return self.model.draft_by(plan, state.cache, context.root_B[:, None], parameters, u_BR)

    def _catch_up(self, state: ModelState, context: Context) -> Tensor:
        """Logits after the root, (B, V)."""
        assert isinstance(state, Eagle3State)
        cache = state.features
        self.model.catch_up(cache)
        with self.model.watch:
            return self.model.logits(cache.last_BH[:, None], cache).logits_BNV[:, 0]


class Eagle3Drafter(OnHiddenStates, FusedModelDrafter):
    """Samples a chain from a head. Shorter chains are the beginning of one that the program drafts:
    its steps cost less than a single eager one.

    Args:
        model, num_tokens, stop, num_fused, keep_logits: as for ``FusedModelDrafter``; the model is
            an :class:`Eagle3Model`.
        has_short_program: whether drafts of one token, with which a governor tries whether drafting
            pays, have a program of their own.
    """

    def __init__(
        self,
        model: HFModel,
        num_tokens: int,
        stop: Stop | float | None = None,
        *,
        num_fused: int = 0,
        keep_logits: bool = False,
        has_short_program: bool = False,
    ) -> None:
        super().__init__(model, num_tokens, stop, num_fused=num_fused, keep_logits=keep_logits)
        self.has_short_program = has_short_program

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        able = super().capabilities
        if not self.has_short_program or not able.fused_lengths:
            return able
        return replace(able, fused_lengths=tuple(dict.fromkeys((self.num_fused, 1))))

    def _has_length(self, γ: int) -> bool:
        return 0 < γ <= self.num_fused

    def _program_for(self, γ: int) -> int:
        return 1 if γ == 1 and self.has_short_program else self.num_fused

    def _run_program(
        self,
        state: ModelState,
        context: Context,
        γ: int,
        parameters: DraftParameters | None,
        u_BD: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """The program reads the newest tokens."""
        root_B1 = context.root_B[:, None]
        done = self.model.draft(state.cache, root_B1, γ, parameters, u_BD)
        if done is None:
            return None
        state.cache.append(γ - 1)  # nobody has read the last token
        recorded, tokens_BN = done
        if parameters is None and self.keep_logits:
            recorded = self.model.module.vocabulary.widened(recorded)
        return recorded, tokens_BN


class Eagle3TreeDrafter(OnHiddenStates, TreeDrafter):
    """Drafts a tree of fixed shape from a head; arguments as ``TreeDrafter``."""

    def _plan_of(self, tree: StaticTree) -> TreePlan:
        return HeadTreePlan(tree.topology, tree.drawn, self.model.device)


class Eagle3DynamicTreeDrafter(OnHiddenStates, DynamicTreeDrafter):
    """Drafts a head's tree of most probable nodes, EAGLE-3's own method; arguments as
    ``DynamicTreeDrafter``."""

    model: Eagle3Model

    def _plan_of(self, depth: int, width: int) -> DynamicTreePlan | None:
        fits = width <= self.model.head.vocabulary.size
        return HeadDynamicTreePlan(depth, width) if fits else None


def _where_known(budget: Budget, committed: Lengths) -> Budget:
    """The budget without the rows about whose tokens the head knows nothing."""
    if min(committed.host):
        return budget
    most_B: Any = budget.max_tokens if budget.tokens_B is None else budget.tokens_B
    return Budget(budget.max_tokens, most_B * (committed.device_B > 0))
