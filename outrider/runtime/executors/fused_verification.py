"""Fused verification: distributions, rule and emitted tokens as one program, without Python between
them.

``torch.export`` traces the rule's own code, whichever rule it is, with softmax and truncation
before it and the estimate of the overlap after it. The rule's random numbers are inputs of the
program, so that it decides as the rule itself would, up to rounding. Temperature and truncation of
each row are inputs too, and so are the nodes that exist: one program serves every batch and chains
of every length. Trees have a program for each shape. What else changes logits (penalties, biases,
processors, grammars, forced tokens, temperature 0 among rows that sample) does so before the
program (``Warp.sampling_logits``), so that all sampling parameters share one program.

A rule opts in by ``traceable: ClassVar[bool] = True``, if its code, while it is traced, reads no
number from a tensor (no ``bool(tensor)``), and draws by ``rng.uniform`` or ``race`` alone. Loops of
unknown length are ``core.repeat_while``, which a program has as an operator. The rule itself
verifies what is left: trees of other shapes, and, where bits must not depend on the executor, all
that are sampled.

Legend: B rows, N nodes, D drafted tokens, R random numbers, K emitted tokens, V vocabulary.
"""

import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from threading import RLock
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from outrider.core import (
    Context,
    Distribution,
    Draft,
    Drawn,
    Overlap,
    Prefix,
    Role,
    Stream,
    Verdict,
    Verification,
    Verifier,
    verify_eagerly,
)
from outrider.core.capabilities import TreeShape
from outrider.core.errors import OutriderWarning
from outrider.core.overlap import estimated_overlap
from outrider.runtime.executors.compile_cache import (
    Program,
    ProgramMissingError,
    first_line,
    only_loads,
)
from outrider.runtime.executors.parity import flat
from outrider.runtime.executors.traced import ROWS
from outrider.runtime.kernels.truncation import truncated
from outrider.sampling import Sampling, Warp
from outrider.sampling.warp import RowParameters, distributions

RuleCompiler = Callable[[nn.Module, Callable[[], ExportedProgram], bool], Program]
"""Compiles a module, given also the function that traces it and whether the module's representation
names all that the program depends on."""

CheckDraft = Callable[[Draft], None]
"""``ChecksDrafts.check_draft``, looked up by name as ``core.round.BindLogits`` is."""

MOST_NODES = 64
NODES = Dim("nodes", min=3, max=MOST_NODES)
"""Of two nodes, the one drafted token would be a size of 1, for which programs are compiled apart.
Such drafts get a third node that does not exist."""

_LONGEST_WALK = 16
"""Programs take each step of a walk, whether a row is still walking or not."""

_PLAIN = (bool, int, float, str)
_TRACED = 3, 5
_COMPARED = (1, 3), (2, 4), (3, 6)
"""Rows and nodes to trace with, and to compare with."""

_TRUNCATED: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"top_k": 9, "min_p": 0.02})
_TOLERANCE = 1e-5


class DraftKind(NamedTuple):
    """What is fixed of the drafts that a program verifies.

    Attributes:
        drawn: how the tokens are obtained.
        tree_shape: of trees; None for chains, of which any length has the same program.
        with_logits: whether they carry the draft model's logits.
        with_drawn_probs: whether they carry the probabilities of chosen tokens.
    """

    drawn: Drawn
    tree_shape: TreeShape | None = None
    with_logits: bool = False
    with_drawn_probs: bool = False

    @classmethod
    def of(cls, draft: Draft) -> "DraftKind":
        """That of a draft."""
        shape = TreeShape(draft.num_nodes, draft.walk_length_bound)
        carried = draft.logits_BNV is not None, draft.drawn_probs_BN is not None
        return cls(draft.drawn, None if draft.is_chain else shape, *carried)

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
        (parents_BN,), walk_length = rest, self.tree_shape.walk_length
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


class FusedLogitVerification(nn.Module):
    """The program of a rule that needs no distribution.

    Args:
        verifier: the rule; a frozen dataclass of plain values.
        sizes: the sizes and dtypes that are fixed.
        kind: what is fixed of the drafts.
    """

    def __init__(self, verifier: Verifier, sizes: str, kind: DraftKind) -> None:
        super().__init__()
        self.verifier = verifier
        self.sizes = sizes
        self.kind = kind

    def extra_repr(self) -> str:
        """All that the program depends on."""
        return f"{self.verifier!r}, {self.sizes}, {self.kind}, {_sources()}"

    def forward(
        self, logits_BNV: Tensor, nodes: list[Tensor], of_model_BNV: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Accepted tokens and the next one, both (B,), the path (B, D), and the emitted tokens
        (B, N). ``nodes`` and ``of_model_BNV`` are those of :meth:`DraftKind.draft`."""
        draft = self.kind.draft(nodes, of_model_BNV)
        return _decisions(
            draft, self.verifier(draft, logits_BNV, GivenNumbers.of([nodes[0][:, 0]] * 2))
        )


class FusedVerification(FusedLogitVerification):
    """The program of a rule that needs the distribution."""

    def forward(  # type: ignore[override]
        self,
        logits_BNV: Tensor,
        nodes: list[Tensor],
        numbers: list[Tensor],
        keys: list[Tensor],
        parameters: list[Tensor],
        of_model_BNV: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The same, then the target's distributions (B, N, V), and the two parts of the overlap,
        each (B, D).

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
        return *_decisions(draft, verdict), p_BNV, *estimated_overlap(draft, p_BNV)


def _decisions(draft: Draft, verdict: Verdict) -> tuple[Tensor, ...]:
    path_BD = verdict.path_BD.contiguous()
    return verdict.num_accepted_B, verdict.next_token_B, path_BD, verdict.emitted(draft)


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


class CompiledVerifier:
    """A ``core.VerificationExecutor`` that verifies by compiled programs where it can, each
    compiled when it is first needed.

    Args:
        make: compiles a rule.
        tree_shape: of the trees that programs verify; None for chains only. The rule itself
            verifies trees of other shapes, such as those that a budget has cut, so that few
            programs are compiled.
        exact: whether bits must not depend on the executor.

    Attributes:
        sealed: whether no more programs are compiled: rules without one verify eagerly.
    """

    sealed: bool = False

    def __init__(
        self, make: RuleCompiler, tree_shape: TreeShape | None = None, *, exact: bool = False
    ) -> None:
        self._make = make
        self._tree_shape = tree_shape
        self._exact = exact
        self._programs: dict[tuple[Verifier, str, DraftKind], Program | None] = {}
        self._last: tuple[ref[Distribution], tuple[object, ...], Program | None] | None = None
        self._lock = RLock()

    def __call__(
        self, verifier: Verifier, draft: Draft, logits_BNV: Tensor, context: Context, rng: Stream
    ) -> Verification:
        program = self._program(verifier, draft, logits_BNV, context.distribution)
        if program is None:
            return verify_eagerly(verifier, draft, logits_BNV, context, rng)
        if context.ends is not None:
            draft = context.ends.cut(draft)
        check: CheckDraft | None = getattr(verifier, "check_draft", None)
        if check is not None:
            check(draft)
        N = draft.num_nodes
        more = max(3 - N, 0)
        warp, prefix = cast(Warp, context.distribution), Prefix.of_draft(context, draft)
        by_distribution = verifier.needs == "distribution"
        z_BNV = (warp.sampling_logits if by_distribution else warp.logits)(logits_BNV, prefix)
        kind = DraftKind.of(draft)
        inputs = [_longer(each, more) for each in (z_BNV, *kind.nodes_of(draft))]
        if by_distribution:
            inputs += [rng.uniform(role, N + more) for role in (Role.ACCEPT, Role.NEXT)]
            inputs += [rng.key_B, rng.position_B, *warp.row_parameters]
        of_model_BNV = kind.of_model(draft)
        inputs += [] if of_model_BNV is None else [_longer(of_model_BNV.float(), more)]
        with self._lock:  # a program has one buffer for what it computes
            num_accepted_B, next_B, *found = program([*map(Tensor.contiguous, inputs)])
        path_BD, emitted_BK, *of_distribution = found if not more else _shorter(found, N)
        verdict = Verdict(path_BD, num_accepted_B, next_B)
        if not of_distribution:
            return Verification(draft, z_BNV, verdict, emitted_BK, dead_BN=prefix.dead_BM)
        p_BNV, *overlap = of_distribution
        return Verification(draft, p_BNV, verdict, emitted_BK, Overlap(*overlap), prefix.dead_BM)

    @property
    def refused(self) -> list[str]:
        """The rules whose program did not compile, or decides otherwise than the rule."""
        return [type(rule).__name__ for (rule, *_), made in self._programs.items() if made is None]

    def warm_up(self, verifier: Verifier, kind: DraftKind, logits_BNV: Tensor) -> None:
        """Compiles a rule for such drafts, and logits of this shape and dtype, if it can be
        compiled."""
        if self.can_compile(verifier, kind):
            carries = kind.drawn != "chosen" or kind.with_logits
            self._program_of(verifier, kind, logits_BNV, carries)

    def can_compile(self, verifier: Verifier, kind: DraftKind) -> bool:
        """Whether a rule may have a program for such drafts."""
        by_distribution = verifier.needs == "distribution"
        fits = kind.drawn == "chosen"
        if by_distribution:
            fits = kind.drawn != "searched" and not kind.with_logits
        shape = kind.tree_shape
        known = shape is None or (shape == self._tree_shape and shape.walk_length <= _LONGEST_WALK)
        return fits and known and _is_traceable(verifier) and not (self._exact and by_distribution)

    def _program(
        self, verifier: Verifier, draft: Draft, logits_BNV: Tensor, distribution: Distribution
    ) -> Program | None:
        fits = 1 < draft.num_nodes <= MOST_NODES and (draft.is_chain or draft.num_nodes > 2)
        bare = draft.step_probs_BN is None
        if not (fits and bare) or logits_BNV.dtype == torch.float64:  # temperatures are in float32
            return None
        kind = DraftKind.of(draft)
        asked, last = (verifier, kind, logits_BNV.dtype), self._last
        if last is not None and last[0]() is distribution and last[1] == asked:
            return last[2]  # usually the same from round to round
        program = None
        if isinstance(distribution, Warp) and self.can_compile(verifier, kind):
            carries = kind.of_model(draft) is not None
            program = self._program_of(verifier, kind, logits_BNV, carries)
        self._last = ref(distribution), asked, program
        return program

    def _program_of(
        self, verifier: Verifier, kind: DraftKind, logits_BNV: Tensor, carries: bool
    ) -> Program | None:
        name = verifier, f"{logits_BNV.shape[2]}, {carries=}", kind
        with self._lock:
            if name not in self._programs and (not self.sealed or only_loads()):
                by_distribution = verifier.needs == "distribution"
                each = (FusedVerification if by_distribution else FusedLogitVerification)(*name)
                with suppress(ProgramMissingError):
                    self._programs[name] = self._compiled(each, logits_BNV, carries)
                self._last = None  # it may remember that there is no program
            return self._programs.get(name)

    def _compiled(
        self, each: FusedLogitVerification, logits_BNV: Tensor, carries: bool
    ) -> Program | None:
        def inputs(rows: int, num_nodes: int) -> list[Any]:
            shape = each.kind.tree_shape
            num_nodes = num_nodes if shape is None else shape.num_nodes
            return _examples(each, rows, num_nodes, logits_BNV, carries)

        name = type(each.verifier).__name__
        try:
            with torch.inference_mode(False):
                own = type(each.verifier).__module__.startswith("outrider.verifiers.")
                program = self._make(each, lambda: _trace(each, inputs(*_TRACED)), own)
        except ProgramMissingError:
            raise
        except Exception as error:  # the compiler's own exceptions are of many kinds
            _warn(f"{name} does not compile, so it verifies as it is: {first_line(error)}")
            return None
        try:
            cases = [inputs(*sizes) for sizes in _COMPARED]
            differences = (_compare(each, case, program(flat(case))) for case in cases)
            difference = next(filter(None, differences), "")
        except Exception as error:
            difference = f"it fails when it is run: {first_line(error)}"
        if difference:
            _warn(f"{name}: its program compiled, but {difference}; the rule verifies as it is")
            return None
        return program


def _longer(each_BN: Tensor, more: int) -> Tensor:
    """A tensor of nodes, (B, N, …), with as many more that do not exist."""
    if not more:
        return each_BN
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
    traceable = getattr(verifier, "traceable", False) and not hasattr(verifier, "with_raw_logits")
    if not traceable or not is_dataclass(verifier):
        return False
    frozen = type(verifier).__dataclass_params__.frozen
    values = (getattr(verifier, each.name) for each in fields(verifier))
    return frozen and all(isinstance(value, _PLAIN) or value is None for value in values)


def _trace(each: FusedLogitVerification, inputs: list[Any]) -> ExportedProgram:
    by_node = {0: ROWS, 1: NODES} if each.kind.tree_shape is None else {0: ROWS}
    _, nodes, *rest = inputs
    sizes: list[Any] = [by_node, [by_node] * len(nodes)]
    if isinstance(each, FusedVerification):
        numbers, keys, parameters, *rest = rest
        sizes += [
            [by_node] * len(numbers),
            *([{0: ROWS}] * len(each) for each in (keys, parameters)),
        ]
    sizes += [by_node] * len(rest)
    with torch.no_grad():
        return torch.export.export(each, tuple(inputs), dynamic_shapes=tuple(sizes), strict=False)


def _examples(
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
    of_model_BNV = 3 * wave_BNV.roll(1, 2)
    if not isinstance(each, FusedVerification):
        return [z_BNV, nodes, *[of_model_BNV] * carries]
    stream = Stream(tokens_BN[:, 0].clone(), tokens_BN[:, 1].clone())
    keys = [stream.key_B, stream.position_B]
    numbers = [stream.uniform(role, N).contiguous() for role in (Role.ACCEPT, Role.NEXT)]
    samplings = [
        Sampling(temperature=0.5 + 0.5 * row, **_TRUNCATED[row % len(_TRUNCATED)])
        for row in range(rows)
    ]
    parameters = list(Warp(samplings, V, device).row_parameters)
    return [z_BNV, nodes, numbers, keys, parameters, *[of_model_BNV.softmax(-1)] * carries]


def _compare(each: FusedLogitVerification, inputs: list[Any], found: list[Tensor]) -> str:
    """How a program's results differ from the rule's; "" where they agree."""
    wanted = each(*inputs)
    if len(found) != len(wanted):
        return f"it has {len(found)} results, where the rule has {len(wanted)}"
    if not all(map(torch.equal, found[:4], wanted[:4])):
        return "it accepts or emits other tokens than the rule"
    for one, other in zip(found[4:], wanted[4:], strict=True):
        if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE):
            error = float((one - other).abs().max())
            return (
                f"its results differ from the rule's: largest error {error:.2g} where "
                f"{_TOLERANCE:.0e} is allowed"
            )
    return ""


def _warn(message: str) -> None:
    warnings.warn(message, OutriderWarning, stacklevel=2)


@lru_cache(maxsize=1)
def _sources() -> str:
    """A hash of the code that the rules of this package consist of."""
    ours = "outrider.core", "outrider.verifiers", "outrider.sampling", __name__
    names = [name for name in sys.modules if name.startswith(ours)]
    text = "".join(inspect.getsource(sys.modules[name]) for name in sorted(names))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
