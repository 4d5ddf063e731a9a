"""Medusa heads draft a tree from the target's last hidden state.

Cai et al., ICML 2024; ``medusa_network.py`` has the network, and which head predicts what.

    h          the last hidden state of the token before the root
    depth i    the distribution of head i, after every node of depth i - 1

The heads do not know the tokens between, so all nodes of a depth have children from the same
distribution (``slots.py``). Children are the best tokens by rank, as the authors draft, or draws
without replacement, whose q a lossless rule can verify by.

A row without a token before its root (a prompt of one token, in its first round) drafts nothing.

Proposes: trees of fixed shape.

Legend: B rows, N nodes, H width of the target, D draft vocabulary, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core import Acceptance, Budget, Capabilities, Context, Draft, Drawn, Scores, Stream
from outrider.drafters.heads.head import NetworkHead, check_target
from outrider.drafters.heads.head_model import drafting_copy
from outrider.drafters.heads.medusa_network import MedusaConfig, MedusaNetwork
from outrider.drafters.heads.slots import Slots, tree_of_slots
from outrider.drafters.tree.grow import Children, StaticTree
from outrider.drafters.tree.topology import Topology
from outrider.runtime import HFModel


class MedusaHead(NetworkHead[MedusaNetwork]):
    """The weights of Medusa heads, which belong to one target; arguments as of ``NetworkHead``."""

    kind = "medusa"

    @property
    def config(self) -> MedusaConfig:
        return self.network.config


@dataclass
class MedusaState:
    """The hidden state of the token before each row's root, and which rows have one."""

    hidden_BH: Tensor
    known_B: Tensor

    def keep(self, rows: Sequence[int]) -> None:
        index_B = torch.tensor(rows, dtype=torch.int64, device=self.known_B.device)
        self.hidden_BH, self.known_B = self.hidden_BH[index_B], self.known_B[index_B]


class MedusaDrafter:
    """Drafts a tree of fixed shape from Medusa heads.

    Args:
        head: the weights, of which a copy is cast to the target's precision.
        target: the model that they were trained for.
        topology: the shape, no deeper than there are heads: the levels below are cut.
        children: ``chosen``, the best tokens by rank; ``distinct`` or ``iid`` draws.

    Raises:
        IncompatibleError: heads for another target; names both numbers.
    """

    def __init__(
        self,
        head: MedusaHead,
        target: HFModel,
        topology: Topology,
        children: Children = "chosen",
    ) -> None:
        check_target(head, target)
        self.network = drafting_copy(head, target)
        self.target = target
        self._tree = StaticTree(topology, children, target.num_tokens, target.device)
        self._vocabulary = None if head.vocabulary.is_full else head.vocabulary.to(target.device)

    @property
    def drawn(self) -> Drawn:
        return self._tree.drawn

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        shape = self._tree.topology
        return Capabilities(
            hidden_layers=(self.target.num_layers,),
            depth=min(shape.depth, self.network.config.num_heads),
            max_nodes=lambda num_tokens: shape.num_nodes,
            drafts_trees=not shape.is_chain,
        )

    def start(self, context: Context) -> MedusaState:
        width, device = self.network.config.hidden_size, self.target.device
        hidden_BH = torch.zeros(context.num_rows, width, dtype=self.target.dtype, device=device)
        return MedusaState(hidden_BH, torch.zeros_like(context.length_B, dtype=torch.bool))

    def read_prompt(
        self, state: MedusaState, context: Context, hidden_BNH: Tensor, first: int
    ) -> None:
        """Takes the hidden state of the token before a row's root from the pass that read it."""
        at_B = context.length_B - 2 - first
        here_B = (at_B >= 0) & (at_B < hidden_BNH.shape[1])
        state.known_B = state.known_B | here_B
        found_BH = _at(hidden_BNH, at_B.clamp(0, hidden_BNH.shape[1] - 1))
        state.hidden_BH = torch.where(here_B[:, None], found_BH, state.hidden_BH)

    def propose(self, state: MedusaState, context: Context, budget: Budget, rng: Stream) -> Draft:
        network = self.network

        def logits(slot: int, before_Bn: Tensor) -> Tensor:
            logits_B1D: Tensor = network(state.hidden_BH[:, None], slot)
            return logits_B1D

        slots = Slots(network.config.num_heads, logits, self._vocabulary)
        return tree_of_slots(slots, self._tree, context, budget, rng, state.known_B)

    def commit(self, state: MedusaState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Takes the hidden state of the last accepted node, which precedes the next root."""
        assert scores.hidden_BNH is not None
        nodes_BN = torch.nn.functional.pad(verdict.path_BD, (1, 0))
        last_B = nodes_BN.gather(1, verdict.num_accepted_B[:, None])[:, 0]
        state.hidden_BH = _at(scores.hidden_BNH, last_B)
        state.known_B = torch.ones_like(state.known_B)

    def join(self, state: MedusaState, other: MedusaState) -> None:
        state.hidden_BH = torch.cat([state.hidden_BH, other.hidden_BH])
        state.known_B = torch.cat([state.known_B, other.known_B])


def _at(hidden_BNH: Tensor, index_B: Tensor) -> Tensor:
    """One hidden state of each row, (B, H)."""
    index_B11 = index_B[:, None, None].expand(-1, 1, hidden_BNH.shape[2])
    return hidden_BNH.gather(1, index_B11)[:, 0]
