"""Fused verification: verifies by compiled programs (``verification_program.py``).

A rule opts in by ``traceable = True``, if its code, while it is traced, reads no number from a
tensor (no ``bool(tensor)``), draws by ``rng.uniform`` or ``race`` alone, and needs neither the
target's raw logits nor the probabilities of a search's steps. Loops of unknown length are
``core.repeat_while``, which a program has as an operator. A rule that needs the parents of the
nodes on the host says ``by_node = True``; its programs are for trees of one shape each. A rule that
compares all nodes at once, instead of walking from sibling to sibling, says ``walks = False``: its
trees may have any number of siblings. Rules that read the distributions of some nodes of a tree
only have ``verify_at`` (``core.ReadsNodes``, ``tree_verification.py``). The rule itself verifies
what is left: trees of other shapes, and, where bits must not depend on the executor, all that are
sampled.

Legend: B rows, N nodes, D drafted tokens, K emitted tokens, V vocabulary.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from threading import RLock
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from outrider.core import (
    Context,
    Deferred,
    Distribution,
    Draft,
    Overlap,
    Prefix,
    Role,
    Scores,
    Stream,
    Verdict,
    Verification,
    Verifier,
    verify_eagerly,
)
from outrider.core.capabilities import TreeShape
from outrider.core.chain import cached_arange
from outrider.core.counts import DraftCounts
from outrider.core.errors import OutriderWarning
from outrider.runtime.executors.compile_cache import (
    Program,
    ProgramMissingError,
    first_line,
    only_loads,
)
from outrider.runtime.executors.parity import flat
from outrider.runtime.executors.tree_verification import (
    FusedTreeVerification,
    QueryDistributions,
)
from outrider.runtime.executors.verification_program import (
    FEWEST_QUERIES,
    MOST_NODES,
    DraftKind,
    FusedLogitVerification,
    FusedVerification,
    computes_by_node,
    difference,
    examples,
    trace,
)
from outrider.sampling import Warp

RuleCompiler = Callable[[nn.Module, Callable[[], ExportedProgram], bool], Program]
"""Compiles a module, given also the function that traces it and whether the module's representation
names all that the program depends on."""

CheckRule = Callable[[FusedLogitVerification, list[Any], list[Tensor]], str]
"""``difference``, or what takes its place."""

CheckDraft = Callable[[Draft], None]
"""``ChecksDrafts.check_draft``, looked up by name as ``core.round.BindLogits`` is."""

_LONGEST_WALK = 16
"""Programs take each step of a walk, whether a row is still walking or not. Rules for the beams of
a search walk down no siblings."""

_MOST_BY_NODE = 33
"""Rules that compute node by node have code for each node, which takes long to compile."""

_PLAIN = (bool, int, float, str)
_TRACED = 3, 5
_COMPARED = (1, 3), (2, 4), (3, 6)
"""Rows and nodes to trace with, and to compare with."""


class CompiledVerifier:
    """A ``core.VerificationExecutor`` that verifies by compiled programs where it can, each
    compiled when it is first needed.

    Args:
        make: compiles a rule.
        tree_shape: of the trees that programs verify; None for chains only. The rule itself
            verifies trees of other shapes, such as those that a budget has cut, so that few
            programs are compiled.
        exact: whether bits must not depend on the executor.
        check: says how a program's results differ from the rule's.

    Attributes:
        sealed: whether no more programs are compiled: rules without one verify eagerly.
    """

    sealed: bool = False

    def __init__(
        self,
        make: RuleCompiler,
        tree_shape: TreeShape | None = None,
        *,
        exact: bool = False,
        check: CheckRule = difference,
    ) -> None:
        self._make = make
        self._check = check
        self._tree_shape = tree_shape
        self._exact = exact
        self._programs: dict[tuple[Verifier, str, DraftKind], Program | None] = {}
        self._last: tuple[ref[Distribution], tuple[object, ...], Program | None] | None = None
        self._lock = RLock()

    def __call__(
        self, verifier: Verifier, draft: Draft, scores: Scores, context: Context, rng: Stream
    ) -> Verification:
        kind, N = DraftKind.of(draft).for_rule(verifier), draft.num_nodes
        program = self._program(verifier, draft, kind, scores.logits_BQV, context.distribution)
        if program is None:
            return verify_eagerly(verifier, draft, scores, context, rng)
        if context.ends is not None:
            draft = context.ends.cut(draft)
        check: CheckDraft | None = getattr(verifier, "check_draft", None)
        if check is not None:
            check(draft)
        warp, prefix = cast(Warp, context.distribution), Prefix.of_draft(context, draft)
        by_distribution, by_query = verifier.needs == "distribution", _reads_queries(verifier, kind)
        of_nodes, of_rows = kind.nodes_of(draft), list[Tensor]()
        if by_query:
            z, query_BN = _logits_of_queries(scores, warp, prefix, draft)
            of_nodes.append(query_BN)
        else:
            z = (warp.sampling_logits if by_distribution else warp.logits)(
                scores.logits_BNV, prefix
            )
        of_nodes = [z, *of_nodes]
        more = max(kind.smallest - N, 0)
        if by_distribution:
            of_rows += [rng.uniform(role, N + more) for role in (Role.ACCEPT, Role.NEXT)]
            of_rows += [rng.key_B, rng.position_B, *warp.row_parameters]
        of_model_BNV = kind.of_model(draft)
        of_model = [] if of_model_BNV is None else [of_model_BNV.float()]
        if more:
            of_nodes, of_model = ([_longer(x, more) for x in each] for each in (of_nodes, of_model))
        inputs = [*of_nodes, *of_rows, *of_model]
        with self._lock:  # a program has one buffer for what it computes
            num_accepted_B, next_B, *found = program([*map(Tensor.contiguous, inputs)])
        path_BD, emitted_BK, *others = found if not more else _shorter(found, N)
        verdict = Verdict(path_BD, num_accepted_B, next_B)
        counts = None
        if kind.tree_shape is not None:
            num = len(DraftCounts._fields)
            counts, others = DraftCounts(*others[:num]), others[num:]
        if by_query:
            target = QueryDistributions(z, query_BN, warp.row_parameters)
            p = Deferred(target.at_all)
        else:
            p = Deferred.known(others.pop(0) if by_distribution else z)
        overlap = Overlap(*others) if others else None
        return Verification(draft, p, verdict, emitted_BK, overlap, prefix.dead_BM, counts)

    @property
    def refused(self) -> list[str]:
        """The rules whose program did not compile, or decides otherwise than the rule."""
        return [type(rule).__name__ for (rule, *_), made in self._programs.items() if made is None]

    def warm_up(self, verifier: Verifier, kind: DraftKind, logits_BNV: Tensor) -> None:
        """Compiles a rule for such drafts, and logits of this shape and dtype, if it can be
        compiled."""
        kind = kind.for_rule(verifier)
        if self.can_compile(verifier, kind):
            carries = kind.drawn != "chosen" or kind.with_logits
            self._program_of(verifier, kind, logits_BNV, carries)

    def can_compile(self, verifier: Verifier, kind: DraftKind) -> bool:
        """Whether a rule may have a program for such drafts."""
        by_distribution = verifier.needs == "distribution"
        fits = kind.drawn == "chosen" and not kind.root_only  # argmax is fast as it is
        if by_distribution:
            fits = not kind.with_logits
        kind = kind.for_rule(verifier)
        shape, own = kind.tree_shape, kind._replace(tree_shape=self._tree_shape)
        known = shape is None or kind == own.for_rule(verifier)
        if computes_by_node(verifier):
            known = known and shape is not None and shape.parents is not None
            known = known and (shape is None or shape.num_nodes <= _MOST_BY_NODE)
        elif shape is not None and kind.drawn != "searched" and getattr(verifier, "walks", True):
            known = known and shape.walk_length <= _LONGEST_WALK
        return fits and known and _is_traceable(verifier) and not (self._exact and by_distribution)

    def _program(
        self,
        verifier: Verifier,
        draft: Draft,
        kind: DraftKind,
        logits_BNV: Tensor,
        distribution: Distribution,
    ) -> Program | None:
        fits = draft.num_nodes <= MOST_NODES and (draft.is_chain or draft.num_nodes > 2)
        if not fits or logits_BNV.dtype == torch.float64:  # temperatures are in float32
            return None
        asked, last = (verifier, kind, logits_BNV.dtype), self._last
        if last is not None and last[0]() is distribution and last[1] == asked:
            return last[2]  # usually the same from round to round
        program = None
        if isinstance(distribution, Warp) and self.can_compile(verifier, kind):
            carries = kind.of_model(draft) is not None
            # drafts of no token end most outputs, which is no reason to compile
            get = self._loaded if kind.root_only else self._program_of
            program = get(verifier, kind, logits_BNV, carries)
        self._last = ref(distribution), asked, program
        return program

    def _program_of(
        self, verifier: Verifier, kind: DraftKind, logits_BNV: Tensor, carries: bool
    ) -> Program | None:
        name = _name(verifier, kind, logits_BNV, carries)
        with self._lock:
            if name not in self._programs and (not self.sealed or only_loads()):
                by_distribution = verifier.needs == "distribution"
                made = FusedVerification if by_distribution else FusedLogitVerification
                each = (FusedTreeVerification if _reads_queries(verifier, kind) else made)(*name)
                with suppress(ProgramMissingError):
                    self._programs[name] = self._compiled(each, logits_BNV, carries)
                self._last = None  # it may remember that there is no program
            return self._programs.get(name)

    def _loaded(
        self, verifier: Verifier, kind: DraftKind, logits_BNV: Tensor, carries: bool
    ) -> Program | None:
        """The program of :meth:`_program_of`, if it is there."""
        return self._programs.get(_name(verifier, kind, logits_BNV, carries))

    def _compiled(
        self, each: FusedLogitVerification, logits_BNV: Tensor, carries: bool
    ) -> Program | None:
        def inputs(rows: int, num_nodes: int) -> list[Any]:
            shape = each.kind.tree_shape
            num_nodes = num_nodes if shape is None else shape.num_nodes
            num_nodes = 1 if each.kind.root_only else num_nodes
            return examples(each, rows, num_nodes, logits_BNV, carries)

        name = type(each.verifier).__name__
        try:
            with torch.inference_mode(False):
                own = type(each.verifier).__module__.startswith("outrider.verifiers.")
                program = self._make(each, lambda: trace(each, inputs(*_TRACED)), own)
        except ProgramMissingError:
            raise
        except Exception as error:  # the compiler's own exceptions are of many kinds
            _warn(f"{name} does not compile, so it verifies as it is: {first_line(error)}")
            return None
        try:
            cases = [inputs(*sizes) for sizes in _COMPARED]
            found = (self._check(each, case, program(flat(case))) for case in cases)
            wrong = next(filter(None, found), "")
        except Exception as error:
            wrong = f"it fails when it is run: {first_line(error)}"
        if wrong:
            _warn(f"{name}: its program compiled, but {wrong}; the rule verifies as it is")
            return None
        return program


def _name(
    verifier: Verifier, kind: DraftKind, logits_BNV: Tensor, carries: bool
) -> tuple[Verifier, str, DraftKind]:
    """What tells a program from others."""
    return verifier, f"{logits_BNV.shape[2]}, {carries=}", kind


def _reads_queries(verifier: Verifier, kind: DraftKind) -> bool:
    """Whether the program is a ``FusedTreeVerification``."""
    return verifier.needs == "distribution" and kind.tree_shape is not None


def _logits_of_queries(
    scores: Scores, warp: Warp, prefix: Prefix, draft: Draft
) -> tuple[Tensor, Tensor]:
    """The logits of the query tokens that a program reads, and the query token of each node.

    They are the target's query tokens, unless logits depend on what precedes a node (penalties,
    processors) or a size of 1 would need another program. Then each node is one.
    """
    queries = scores.queries
    if queries is not None and warp.keeps_logits and scores.logits_BQV.shape[1] >= FEWEST_QUERIES:
        return warp.sampling_logits(scores.logits_BQV, prefix), queries.index_BN
    B, N = draft.tokens_BN.shape
    node_BN = cached_arange(N, draft.tokens_BN.device).expand(B, N)
    return warp.sampling_logits(scores.logits_BNV, prefix), node_BN


def _longer(each_BN: Tensor, more: int) -> Tensor:
    """A tensor of nodes, (B, N, …), with as many more that do not exist."""
    B, _, *rest = each_BN.shape
    return torch.cat([each_BN, each_BN.new_zeros(B, more, *rest)], 1)


def _shorter(found: Sequence[Tensor], N: int) -> list[Tensor]:
    """The path, emitted tokens, distributions and overlap of a program for the first N nodes
    only."""
    path_BD, *whole = found
    by_node, by_depth = whole[:2], [path_BD, *whole[2:]]
    path_BD, *overlap = (each[:, : N - 1] for each in by_depth)
    return [path_BD, *(each[:, :N] for each in by_node), *overlap]


def _is_traceable(verifier: Verifier) -> bool:
    """Whether a rule opts in, is the same in all rounds, and its representation names all of its
    parameters."""
    if not getattr(verifier, "traceable", False) or not is_dataclass(verifier):
        return False
    frozen = type(verifier).__dataclass_params__.frozen
    values = (getattr(verifier, each.name) for each in fields(verifier))
    return frozen and all(isinstance(value, _PLAIN) or value is None for value in values)


def _warn(message: str) -> None:
    warnings.warn(message, OutriderWarning, stacklevel=2)
