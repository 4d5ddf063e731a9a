"""What a drafter can do and what it needs, declared in one object.

The engine and the wrappers around drafters read it when they are built: to reserve memory, to
compile programs, to decide what to wrap. A wrapper derives its own from the wrapped drafter's by
``dataclasses.replace``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

M = TypeVar("M")
"""The class of models that a drafter runs, such as ``HFModel``; ``core`` knows none."""


def chain_nodes(num_tokens: int) -> int:
    """Nodes of a chain: the root and the drafted tokens."""
    return num_tokens + 1


class TreeShape(NamedTuple):
    """What programs that verify trees depend on.

    Attributes:
        num_nodes: nodes, root included.
        walk_length: ``Draft.max_walk_length``.
        parents: ``Draft.parents``; None where the shape varies from round to round. Only programs
            of rules that compute node by node depend on it.
    """

    num_nodes: int
    walk_length: int
    parents: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Capabilities(Generic[M]):
    """A drafter's declaration. The defaults are those of a drafter without a model that proposes
    chains.

    Attributes:
        models: the models that it runs, for their timers, health checks, context limits and memory.
        target: the model that the engine must run as its target because the drafts share its state
            (the layers of an early exit); None where any target will do.
        hidden_layers: layers of the target whose hidden states the drafter reads, which then is a
            ``ReadsHiddenStates``; none by default.
        drafts: whether it ever proposes a token; plain decoding does not.
        depth: the draft length γ that the engine takes where the user sets none, such as the number
            of levels of a static tree; None leaves it to the engine.
        max_nodes: most nodes of a draft of γ levels, root included; with models also the most KV
            slots that drafting takes after the committed tokens, whichever is more.
        slot_bytes: bytes of KV buffers that its state takes per row and token, besides those of its
            models: the cache of a head.
        drafts_trees: whether the target has to score trees.
        drafts_chains: whether, of a drafter of trees, the drafts of some rounds are chains.
        tree_shape: the shape of its trees of γ levels, where all have the same. The engine compiles
            programs that verify them.
        runs_trees: whether its own models run over trees.
        fused_lengths: lengths of the drafts that its models make by one compiled program each; 1
            alone if each token takes one.
        fused_tree: the trees of γ levels that its models grow by one compiled program
            (``runtime.executors.fused_draft.DraftPlan``); None if none does.
        stops_early: whether it ends its drafts by a stopping rule that it was given; the engine
            then puts no other around it.
        handles_context_limit: whether it goes on, without drafts, in rows that have filled its
            models' context; the engine wraps others.
        rewindable: whether its state is a ``CanRollBack``, which forgets tokens that were taken
            back and reads anew what the context has after the others. Any other state is started
            anew from the context.
        reviews: whether it is a ``ReviewsTokens``.
        starts_late: whether it is a ``StartsLate``.
        drafts_freely: whether some of its sources can draft without its models
            (``Budget.free_only``).
        keeps_logits: whether its drafts of greedy rows carry its model's logits.
        shares_noise: whether its sampled drafts are chosen tokens that were drawn with noise shared
            with the rule, and carry their probabilities.
        own_vocabulary: whether its models read and write tokens of a vocabulary of their own.
    """

    models: tuple[M, ...] = ()
    target: M | None = None
    hidden_layers: tuple[int, ...] = ()
    drafts: bool = True
    depth: int | None = None
    max_nodes: Callable[[int], int] = chain_nodes
    slot_bytes: int = 0
    drafts_trees: bool = False
    drafts_chains: bool = False
    tree_shape: TreeShape | None = None
    runs_trees: bool = False
    fused_lengths: tuple[int, ...] = ()
    fused_tree: object | None = None
    stops_early: bool = False
    handles_context_limit: bool = False
    rewindable: bool = False
    reviews: bool = False
    starts_late: bool = False
    drafts_freely: bool = False
    keeps_logits: bool = False
    shares_noise: bool = False
    own_vocabulary: bool = False
