"""A verification program: distributions, rule and emitted tokens, without Python between them.

``torch.export`` traces the rule's own code, whichever rule it is, with softmax and truncation
before it and the estimate of the overlap after it. The rule's random numbers are inputs of the
program, so that it decides as the rule itself would, up to rounding. Temperature and truncation of
each row are inputs too, and so are the nodes that exist: one program serves every batch and chains
of every length. Trees have a program for each shape (``tree_verification.py``). What else changes
logits (penalties, biases, processors, grammars, forced tokens, temperature 0 among rows that
sample) does so before the program (``Warp.sampling_logits``), so that all sampling parameters share
one program. Drafts of no token, those of plain decoding, have a program of their own.

Legend: B rows, N nodes, D drafted tokens, R random numbers, K emitted tokens, V vocabulary.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from outrider.core import Draft, Drawn, Role, Stream, Verdict, Verifier
from outrider.core.capabilities import TreeShape
from outrider.core.counts import DraftCounts
from outrider.core.overlap import accepted_nodes, estimated_overlap, overlap_by_depth
from outrider.runtime.executors.compile_cache import hash_of_sources
from outrider.runtime.executors.export import export
from outrider.runtime.executors.traced_cache import ROWS
from outrider.runtime.kernels.truncation import truncated
from outrider.sampling import Sampling, Warp
from outrider.sampling.warp import RowParameters, distributions

FEWEST_NODES, MOST_NODES = 3, 64
NODES = Dim("nodes", min=FEWEST_NODES, max=MOST_NODES)
"""Of two nodes, the one drafted token would be a size of 1, for which programs are compiled apart.
Such drafts get a third node that does not exist."""

FEWEST_QUERIES = 2
QUERIES = Dim("queries", min=FEWEST_QUERIES, max=MOST_NODES)

_TRUNCATED: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"top_k": 9, "min_p": 0.02})
_TOLERANCE = 1e-5
_PROGRAMS = __name__, "outrider.runtime.executors.tree_verification"


class DraftKind(NamedTuple):
    """What is fixed of the drafts that a program verifies.

    Attributes:
        drawn: how the tokens are obtained.
        tree_shape: of trees; None for chains, of which any length has the same program.
        with_logits: whether they carry the draft model's logits.
        with_drawn_probs: whether they carry the probabilities of chosen tokens.
        root_only: whether they have no drafted token.
    """

    drawn: Drawn
    tree_shape: TreeShape | None = None
    with_logits: bool = False
    with_drawn_probs: bool = False
    root_only: bool = False

    @classmethod
    def of(cls, draft: Draft) -> "DraftKind":
        """That of a draft."""
        num_nodes, shape = draft.num_nodes, None
        if not draft.is_chain:
            shape = TreeShape(num_nodes, draft.walk_length_bound, draft.parents)
        carried = draft.logits_BNV is not None, draft.drawn_probs_BN is not None
        return cls(draft.drawn, shape, *carried, num_nodes == 1)

    def for_rule(self, verifier: Verifier) -> "DraftKind":
        """What a rule's program depends on: the parents of the nodes only if the rule computes node
        by node, so that other rules have one program for all trees of a size."""
        shape = self.tree_shape
        if shape is None or shape.parents is None or computes_by_node(verifier):
            return self
        return self._replace(tree_shape=shape._replace(parents=None))

    @property
    def smallest(self) -> int:
        """The fewest nodes that the program takes."""
        return 1 if self.root_only else FEWEST_NODES

    def nodes_of(self, draft: Draft) -> list[Tensor]:
        """What a draft of this kind says of each of its nodes, each (B, N): tokens, mask, of trees
        parents, and the probabilities of chosen tokens."""
        nodes = [draft.tokens_BN, draft.mask_BN]
        nodes += [] if self.tree_shape is None else [draft.parents_BN]
        return nodes if draft.drawn_probs_BN is None else [*nodes, draft.drawn_probs_BN.float()]

    def of_model(self, draft: Draft) -> Tensor | None:
        """What a draft of this kind carries of the draft model, (B, N, V): its logits, or the
        distributions that tokens were drawn from."""
        return draft.logits_BNV if self.with_logits else draft.probs_BNV

    def draft(self, nodes: Sequence[Tensor], of_model_BNV: Tensor | None = None) -> Draft:
        """A draft of this kind.

        Args:
            nodes: as :meth:`nodes_of`.
            of_model_BNV: as :meth:`of_model`.
        """
        tokens_BN, mask_BN, *rest = nodes
        drawn_probs_BN = rest.pop() if self.with_drawn_probs else None
        given = of_model_BNV, None
        logits_BNV, q_BNV = given if self.with_logits else given[::-1]
        if self.tree_shape is None:
            return Draft.chain(
                tokens_BN,
                mask_BN,
                q_BNV,
                self.drawn,
                logits_BNV,
                drawn_probs_BN=drawn_probs_BN,
            )
        (parents_BN,), (_, walk_length, parents) = rest, self.tree_shape
        if parents is not None and logits_BNV is None and drawn_probs_BN is None:
            return Draft.tree(parents, tokens_BN, mask_BN, q_BNV, self.drawn, walk_length)
        return Draft(
            tokens_BN,
            parents_BN,
            mask_BN,
            q_BNV,
            self.drawn,
            logits_BNV=logits_BNV,
            max_walk_length=walk_length,
            drawn_probs_BN=drawn_probs_BN,
        )


def computes_by_node(verifier: Verifier) -> bool:
    """Whether a rule's program is one for a single shape of trees, given by ``Draft.parents``."""
    return getattr(verifier, "by_node", False)


class FusedLogitVerification(nn.Module):
    """The program of a rule that needs no distribution.

    Args:
        verifier: the rule; a frozen dataclass of plain values.
        sizes: the sizes and dtypes that are fixed.
        kind: what is fixed of the drafts.
    """

    reads_queries: ClassVar[bool] = False
    """Whether the logits are those of query tokens instead of nodes."""

    def __init__(self, verifier: Verifier, sizes: str, kind: DraftKind) -> None:
        super().__init__()
        self.verifier = verifier
        self.sizes = sizes
        self.kind = kind

    def extra_repr(self) -> str:
        """All that the program depends on."""
        return f"{self.verifier!r}, {self.sizes}, {self.kind}, {_sources()}"

    @property
    def num_of_nodes(self) -> int:
        """How many inputs tell of nodes."""
        of_tree = (self.kind.tree_shape is not None) + self.reads_queries
        return 2 + of_tree + self.kind.with_drawn_probs

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments of :meth:`forward`, from the inputs of a program in their order."""
        end = 1 + self.num_of_nodes
        return inputs[0], list(inputs[1:end]), *inputs[end:]

    def forward(
        self, logits_BNV: Tensor, nodes: list[Tensor], of_model_BNV: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Accepted tokens and the next one, both (B,), the path (B, D), the emitted tokens (B, N),
        and of trees ``DraftCounts`` and, of a lossless rule, the overlap. ``nodes`` and
        ``of_model_BNV`` are those of :meth:`DraftKind.draft`."""
        draft = self.kind.draft(nodes, of_model_BNV)
        verdict = self.verifier(draft, logits_BNV, GivenNumbers.of([nodes[0][:, 0]] * 2))
        found = decisions(draft, verdict)
        if draft.is_chain or not self.verifier.lossless:
            return found
        return *found, *overlap_by_depth(draft, accepted_nodes(draft, verdict))


class FusedVerification(FusedLogitVerification):
    """The program of a rule that needs the distribution."""

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        logits_BNV, nodes, *rest = super().arguments(inputs)
        end = 4 + len(RowParameters._fields)
        return logits_BNV, nodes, rest[:2], rest[2:4], rest[4:end], *rest[end:]

    def forward(  # type: ignore[override]
        self,
        logits_BNV: Tensor,
        nodes: list[Tensor],
        numbers: list[Tensor],
        keys: list[Tensor],
        parameters: list[Tensor],
        of_model_BNV: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The same of chains, then the target's distributions (B, N, V), and the two parts of the
        overlap, each (B, D).

        Args:
            logits_BNV: of the target, as ``Warp.sampling_logits`` returns them.
            nodes: as before.
            numbers: random numbers to accept with, and for next tokens, each (B, N).
            keys: of the rows, and their positions, for noise: as of ``Stream``, each (B,).
            parameters: ``RowParameters``.
            of_model_BNV: the draft's distributions; chosen tokens have none.
        """
        p_BNV = distributions(logits_BNV, RowParameters(*parameters), truncated)
        draft = self.kind.draft(nodes, of_model_BNV)
        verdict = self.verifier(draft, p_BNV, GivenNumbers.of(keys, *numbers))
        return *decisions(draft, verdict), p_BNV, *estimated_overlap(draft, p_BNV)


def decisions(draft: Draft, verdict: Verdict) -> tuple[Tensor, ...]:
    """The first results of a program: accepted tokens, the next one, the path, emitted tokens, and
    of trees ``DraftCounts``."""
    path_BD = verdict.path_BD.contiguous()
    found = verdict.num_accepted_B, verdict.next_token_B, path_BD, verdict.emitted(draft)
    return found if draft.is_chain else (*found, *DraftCounts.of(draft, verdict))


@dataclass(frozen=True)
class GivenNumbers(Stream):
    """A stream of numbers that a program is given.

    Attributes:
        by_role: the numbers of each role, (B, J).
    """

    by_role: tuple[tuple[Role, Tensor], ...] = ()

    @classmethod
    def of(cls, keys: Sequence[Tensor], *numbers: Tensor) -> "GivenNumbers":
        """Keys of the rows and their positions, and numbers to accept with and for next tokens, or
        none."""
        pairs = zip((Role.ACCEPT, Role.NEXT), numbers, strict=False)
        key_B, position_B = keys
        return cls(key_B, position_B, by_role=tuple(pairs))

    def uniform(self, role: Role, num: int, first: int = 0) -> Tensor:
        given = dict(self.by_role)
        if role not in given:
            raise NotImplementedError(f"a program is given no numbers for {role.name}")
        return given[role][:, first : first + num]


def trace(each: FusedLogitVerification, inputs: list[Any]) -> ExportedProgram:
    """The program of such drafts, from inputs as :func:`examples` returns them."""
    any_length = each.kind.tree_shape is None and not each.kind.root_only
    by_node = {0: ROWS, 1: NODES} if any_length else {0: ROWS}
    _, nodes, *rest = inputs
    by_query = {0: ROWS, 1: QUERIES} if each.reads_queries else by_node
    sizes: list[Any] = [by_query, [by_node] * len(nodes)]
    if isinstance(each, FusedVerification):
        numbers, keys, parameters, *rest = rest
        sizes += [
            [by_node] * len(numbers),
            *([{0: ROWS}] * len(each) for each in (keys, parameters)),
        ]
    sizes += [by_node] * len(rest)
    return export(each, inputs, sizes)


def examples(
    each: FusedLogitVerification,
    rows: int,
    num_nodes: int,
    logits_BNV: Tensor,
    carries: bool,
) -> list[Any]:
    """Inputs like those of a round; some of the drafted tokens are the target's argmax, and some
    rows have fewer nodes and another truncation than others. ``carries`` says whether drafts carry
    anything of the draft model."""
    V, N, device = logits_BNV.shape[2], num_nodes, logits_BNV.device
    wave_BNV = (torch.arange(rows * N * V, device=device) * 0.7).sin().view(rows, N, V)
    z_BNV = 4 * wave_BNV
    best_BN = z_BNV.argmax(-1).roll(1, 1)
    index_BN = torch.arange(rows * N, device=device).view(rows, N)
    row_B = index_BN[:, 0] // N
    tokens_BN = torch.where(index_BN % 3 > 0, best_BN, index_BN % V)
    mask_BN = index_BN % N < (N - row_B % N)[:, None]
    nodes = [tokens_BN, mask_BN]
    if each.kind.tree_shape is not None:  # two paths from the root on
        nodes.append(((index_BN % N) - 2).clamp(min=0) - (index_BN % N == 0).long())
    if each.kind.with_drawn_probs:
        nodes.append(wave_BNV[..., 0].abs() + 0.1)
    if each.reads_queries:  # the last two nodes share theirs
        nodes.append((index_BN % N).clamp(max=N - 2))
        z_BNV = z_BNV[:, : N - 1].contiguous()
    of_model_BNV = 3 * wave_BNV.roll(1, 2)
    if not isinstance(each, FusedVerification):
        return [z_BNV, nodes, *[of_model_BNV] * carries]
    stream = Stream(tokens_BN[:, 0].clone(), tokens_BN[:, -1].clone())
    keys = [stream.key_B, stream.position_B]
    numbers = [stream.uniform(role, N).contiguous() for role in (Role.ACCEPT, Role.NEXT)]
    samplings = [
        Sampling(temperature=0.5 + 0.5 * row, **_TRUNCATED[row % len(_TRUNCATED)])
        for row in range(rows)
    ]
    parameters = list(Warp(samplings, V, device).row_parameters)
    return [z_BNV, nodes, numbers, keys, parameters, *[of_model_BNV.softmax(-1)] * carries]


def difference(each: FusedLogitVerification, inputs: list[Any], found: list[Tensor]) -> str:
    """How a program's results differ from the rule's; "" where they agree."""
    wanted = each(*inputs)
    if len(found) != len(wanted):
        return f"it has {len(found)} results, where the rule has {len(wanted)}"
    num = 4 if each.kind.tree_shape is None else 4 + len(DraftCounts._fields)
    if not all(map(torch.equal, found[:num], wanted[:num])):
        return "it accepts or emits other tokens than the rule"
    for one, other in zip(found[num:], wanted[num:], strict=True):
        if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE):
            error = float((one - other).abs().max())
            return (
                f"its results differ from the rule's: largest error {error:.2g} where "
                f"{_TOLERANCE:.0e} is allowed"
            )
    return ""


@lru_cache(maxsize=1)
def _sources() -> str:
    """A hash of the code that the rules of this package consist of."""
    ours = "outrider.core", "outrider.verifiers", "outrider.sampling", *_PROGRAMS
    names = [name for name in sys.modules if name.startswith(ours)]
    return hash_of_sources(*(sys.modules[name] for name in sorted(names)))
