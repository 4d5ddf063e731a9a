"""Fused verification: softmax, rule and emitted tokens as one program, without Python between them.

``torch.export`` traces the rule's own code, whichever rule it is, with the softmax before it and
the estimate of the overlap after it. The rule's random numbers are inputs of the program, so that
it decides as the rule itself would, up to rounding.

A rule opts in by ``traceable: ClassVar[bool] = True``, if its code reads no number from a tensor
(no ``bool(tensor)``), draws by ``rng.uniform`` alone, and decides on each token without regard to
the rows after it: drafts are not cut at their end tokens before a program verifies them. The rule
itself verifies all other drafts: those that are no full chains, those whose distributions are more
than a temperature, and, where bits must not depend on the executor, all that are sampled.

Legend: B rows, N nodes, D drafted tokens, R random numbers, K emitted tokens, V vocabulary.
"""

import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from threading import RLock
from typing import cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from outrider.core import (
    NUM_PER_ROLE,
    Context,
    Distribution,
    Draft,
    Overlap,
    Stream,
    Verdict,
    Verification,
    Verifier,
    chain_tensors_like,
    verify_eagerly,
)
from outrider.core.errors import OutriderWarning
from outrider.core.overlap import estimated_overlap
from outrider.runtime.executors.compile_cache import Program, first_line
from outrider.runtime.executors.traced import ROWS
from outrider.sampling import Warp
from outrider.sampling.warp import softmax_at

RuleCompiler = Callable[[nn.Module, Callable[[], ExportedProgram], bool], Program]
"""Compiles a module, given also the function that traces it and whether the module's representation
names all that the program depends on."""

_PLAIN = (bool, int, float, str)
_TRACED_ROWS = 3
_TOLERANCE = 1e-5


class FusedLogitVerification(nn.Module):
    """The program of a rule that needs no distribution.

    Args:
        verifier: the rule; a frozen dataclass of plain values.
        kind: the sizes and dtypes that are fixed.
    """

    def __init__(self, verifier: Verifier, kind: str) -> None:
        super().__init__()
        self.verifier = verifier
        self.kind = kind

    def extra_repr(self) -> str:
        """All that the program depends on."""
        return f"{self.verifier!r}, {self.kind}, {_sources()}"

    def forward(self, logits_BNV: Tensor, tokens_BN: Tensor) -> tuple[Tensor, ...]:
        """Accepted tokens and the next one, both (B,), and the emitted ones (B, N)."""
        z_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
        draft = Draft.chain(tokens_BN, None, None, "chosen")
        verdict = self.verifier(draft, z_BNV, _numbers(tokens_BN[:, 0]))
        return verdict.num_accepted_B, verdict.next_token_B, verdict.emitted(draft)


class FusedVerification(FusedLogitVerification):
    """The program of a rule that needs the distribution, for chains that were drawn."""

    def forward(  # type: ignore[override]
        self,
        logits_BNV: Tensor,
        tokens_BN: Tensor,
        u_BR: Tensor,
        temperature_B: Tensor,
        q_BNV: Tensor,
    ) -> tuple[Tensor, ...]:
        """The same, then the target's distributions (B, N, V), and the two parts of the overlap,
        each (B, D)."""
        z_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
        p_BNV = softmax_at(z_BNV, temperature_B)
        draft = Draft.chain(tokens_BN, None, q_BNV, "iid")
        verdict = self.verifier(draft, p_BNV, _numbers(tokens_BN[:, 0], u_BR))
        emitted_BK, found = verdict.emitted(draft), estimated_overlap(draft, p_BNV)
        return verdict.num_accepted_B, verdict.next_token_B, emitted_BK, p_BNV, *found


class CompiledVerifier:
    """A ``core.VerificationExecutor`` that verifies by compiled programs where it can, each
    compiled when it is first needed.

    Args:
        make: compiles a rule.
        num_drafted: tokens of the drafts that programs verify. The rule itself verifies drafts of
            other lengths, so that few programs are compiled.
        exact: whether bits must not depend on the executor.

    Attributes:
        sealed: whether no more programs are compiled: rules without one verify eagerly.
    """

    sealed: bool = False

    def __init__(self, make: RuleCompiler, num_drafted: int, *, exact: bool = False) -> None:
        self._make = make
        self._num_nodes = num_drafted + 1
        self._exact = exact
        self._programs: dict[tuple[Verifier, str], Program | None] = {}
        self._last: tuple[ref[Distribution], tuple[object, ...], Program | None] | None = None
        self._lock = RLock()

    def __call__(
        self, verifier: Verifier, draft: Draft, logits_BNV: Tensor, context: Context, rng: Stream
    ) -> Verification:
        program = self._program(verifier, draft, logits_BNV, context.distribution)
        if program is None:
            return verify_eagerly(verifier, draft, logits_BNV, context, rng)
        inputs = [logits_BNV.contiguous(), draft.tokens_BN.contiguous()]
        if draft.probs_BNV is not None:
            temperature_B = cast(Warp, context.distribution).temperature_B
            inputs += [rng.uniforms_BJ.contiguous(), temperature_B, draft.probs_BNV.contiguous()]
        with self._lock:  # a program has one buffer for what it computes
            num_accepted_B, next_B, emitted_BK, *of_distribution = program(inputs)
        if context.ends is not None:
            draft = context.ends.cut(draft)
        path_BD = chain_tensors_like(draft.tokens_BN).path_BD
        verdict = Verdict(path_BD, num_accepted_B, next_B)
        if not of_distribution:
            return Verification(draft, logits_BNV, verdict, emitted_BK)
        p_BNV, *found = of_distribution
        counted_BD = draft.mask_BN[:, 1:]
        of_alpha = found if draft.is_full else (torch.where(counted_BD, x, 0.0) for x in found)
        return Verification(draft, p_BNV, verdict, emitted_BK, Overlap(*of_alpha))

    def warm_up(self, verifier: Verifier, logits_BNV: Tensor) -> None:
        """Compiles a rule for logits of this shape and dtype, if it can be compiled."""
        if self.can_compile(verifier):
            q_BNV = logits_BNV.float() if verifier.needs == "distribution" else None
            self._program_of(verifier, logits_BNV, q_BNV)

    def can_compile(self, verifier: Verifier) -> bool:
        """Whether a rule may have a program."""
        return _is_traceable(verifier) and self._allows(verifier)

    def _program(
        self, verifier: Verifier, draft: Draft, logits_BNV: Tensor, distribution: Distribution
    ) -> Program | None:
        fits = draft.is_full and draft.num_nodes == self._num_nodes
        bare = draft.logits_BNV is None and draft.step_probs_BN is None
        if not (fits and bare) or logits_BNV.dtype == torch.float64:  # temperatures are in float32
            return None
        asked, last = (verifier, draft.drawn, logits_BNV.dtype), self._last
        if last is not None and last[0]() is distribution and last[1] == asked:
            return last[2]  # usually the same from round to round
        fits = _fits(verifier, draft, distribution) and self._allows(verifier)
        program = self._program_of(verifier, logits_BNV, draft.probs_BNV) if fits else None
        self._last = ref(distribution), asked, program
        return program

    def _allows(self, verifier: Verifier) -> bool:
        return self._num_nodes <= NUM_PER_ROLE and not (
            self._exact and verifier.needs == "distribution"
        )

    def _program_of(
        self, verifier: Verifier, logits_BNV: Tensor, q_BNV: Tensor | None
    ) -> Program | None:
        sizes, dtype = tuple(logits_BNV.shape[1:]), logits_BNV.dtype
        kind = f"{sizes}, {dtype}, {None if q_BNV is None else q_BNV.dtype}"
        with self._lock:
            if (verifier, kind) not in self._programs and not self.sealed:
                each = (FusedLogitVerification if q_BNV is None else FusedVerification)(
                    verifier, kind
                )
                self._programs[verifier, kind] = self._compiled(each, logits_BNV, q_BNV)
            return self._programs.get((verifier, kind))

    def _compiled(
        self, each: FusedLogitVerification, logits_BNV: Tensor, q_BNV: Tensor | None
    ) -> Program | None:
        def inputs(rows: int) -> list[Tensor]:
            return _examples(rows, logits_BNV, q_BNV)

        name = type(each.verifier).__name__
        try:
            with torch.inference_mode(False):
                own = type(each.verifier).__module__.startswith("outrider.verifiers.")
                program = self._make(each, lambda: _trace(each, inputs(_TRACED_ROWS)), own)
        except Exception as error:  # the compiler's own exceptions are of many kinds
            _warn(f"{name} does not compile, so it verifies as it is: {first_line(error)}")
            return None
        try:
            differences = (_compare(each, inputs(rows), program(inputs(rows))) for rows in (1, 2))
            difference = next(filter(None, differences), "")
        except Exception as error:
            difference = f"it fails when it is run: {first_line(error)}"
        if difference:
            _warn(f"{name}: its program compiled, but {difference}; the rule verifies as it is")
            return None
        return program


def _fits(verifier: Verifier, draft: Draft, distribution: Distribution) -> bool:
    """Whether full chains like this one may have a program."""
    by_distribution = verifier.needs == "distribution"
    return (
        draft.drawn == ("iid" if by_distribution else "chosen")
        and isinstance(distribution, Warp)
        and (distribution.only_scales if by_distribution else distribution.keeps_logits)
        and _is_traceable(verifier)
    )


def _is_traceable(verifier: Verifier) -> bool:
    """Whether a rule opts in, is the same in all rounds, and its representation names all of its
    parameters."""
    traceable = getattr(verifier, "traceable", False) and not hasattr(verifier, "with_raw_logits")
    if not traceable or not is_dataclass(verifier):
        return False
    frozen = type(verifier).__dataclass_params__.frozen
    values = (getattr(verifier, each.name) for each in fields(verifier))
    return frozen and all(isinstance(value, _PLAIN) or value is None for value in values)


def _trace(each: nn.Module, inputs: list[Tensor]) -> ExportedProgram:
    sizes = tuple({0: ROWS} for _ in inputs)
    with torch.no_grad():
        return torch.export.export(each, tuple(inputs), dynamic_shapes=sizes, strict=False)


def _examples(rows: int, logits_BNV: Tensor, q_BNV: Tensor | None) -> list[Tensor]:
    """Inputs like those of a round; some of the drafted tokens are the target's argmax."""
    _, N, V = logits_BNV.shape
    device = logits_BNV.device
    wave_BNV = (torch.arange(rows * N * V, device=device) * 0.7).sin().view(rows, N, V)
    z_BNV = (4 * wave_BNV).to(logits_BNV.dtype)
    q_BNV = None if q_BNV is None else (3 * wave_BNV.roll(1, 2)).softmax(-1).to(q_BNV.dtype)
    best_BN = z_BNV.argmax(-1).roll(1, 1)
    index_BN = torch.arange(rows * N, device=device).view(rows, N)
    tokens_BN = torch.where(index_BN % 3 > 0, best_BN, index_BN % V)
    if q_BNV is None:
        return [z_BNV, tokens_BN]
    u_BR = Stream(tokens_BN[:, 0], tokens_BN[:, 1]).uniforms_BJ
    return [z_BNV, tokens_BN, u_BR, torch.linspace(0.5, 1.5, rows, device=device), q_BNV]


def _numbers(key_B: Tensor, u_BR: Tensor | None = None) -> Stream:
    """A stream that has these numbers only, whatever its key."""
    return Stream(key_B, key_B, precomputed=None if u_BR is None else lambda: u_BR)


def _compare(each: FusedLogitVerification, inputs: list[Tensor], found: list[Tensor]) -> str:
    """How a program's results differ from the rule's; "" where they agree. Both compute in float32,
    whatever the dtype of the logits."""
    wanted = each(*inputs)
    if len(found) != len(wanted):
        return f"it has {len(found)} results, where the rule has {len(wanted)}"
    if not all(map(torch.equal, found[:3], wanted[:3])):
        return "it accepts or emits other tokens than the rule"
    for one, other in zip(found[3:], wanted[3:], strict=True):
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
    ours = ("outrider.core", "outrider.verifiers", __name__, softmax_at.__module__)
    names = [name for name in sys.modules if name.startswith(ours)]
    text = "".join(inspect.getsource(sys.modules[name]) for name in sorted(names))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
