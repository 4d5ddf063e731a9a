"""The named methods: the one place where a command-line string meets a class."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import UnknownMethodError
from outrider.core.protocols import Drafter, Verifier
from outrider.core.round import check_compatible
from outrider.drafters import COUPLED, BildDrafter, ModelDrafter, NoDraft
from outrider.models import HFModel
from outrider.options import Option, options_of, resolve
from outrider.verifiers import (
    Bild,
    Block,
    Cascade,
    CascadeGreedy,
    Coupled,
    Ensemble,
    EnsembleGreedy,
    Greedy,
    Lenience,
    Mentored,
    Rejection,
    Relaxed,
    RelaxedGreedy,
    SampleMatch,
    Typical,
)


@dataclass(frozen=True)
class Parts:
    """What a drafter may be built from."""

    target: HFModel
    draft: HFModel | None = None
    draft_confidence: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """A method with its options settled.

    Attributes:
        verifier: the rule for a batch in which some row samples.
        greedy_verifier: the rule when every row of the batch is at temperature 0.
        drafter: builds the drafter.
    """

    verifier: Verifier
    greedy_verifier: Verifier
    drafter: Callable[[Parts], Drafter[Any]]

    @property
    def greedy_only(self) -> bool:
        """Whether it is defined at temperature 0 alone."""
        return self.verifier.needs != "law"

    @property
    def greedy_apart(self) -> bool:
        """Whether greedy requests need a batch of their own, as another rule judges them there.

        Exact match with the argmax is what every other rule does with a point mass.
        """
        return self.greedy_verifier != self.verifier and not isinstance(
            self.greedy_verifier, Greedy
        )

    def build(self, parts: Parts) -> Drafter[Any]:
        """The drafter, checked against the rules.

        Raises:
            IncompatibleError: a rule that cannot judge it.
        """
        drafter = self.drafter(parts)
        check_compatible(drafter, self.verifier)
        return drafter


@dataclass(frozen=True)
class Method:
    """A drafter and a verification rule under a name.

    Attributes:
        name: what users type.
        summary: one line for them.
        paper: where it was published.
        needs: what it needs besides a target.
        rule: the verifier's class; its parameters are options of the method.
        drafter: builds the drafter from the parts; its keyword-only parameters are options too.
        greedy: the rule for a batch at temperature 0, from the other one.
    """

    name: str
    summary: str
    paper: str
    needs: str
    rule: Callable[..., Verifier]
    drafter: Callable[..., Drafter[Any]]
    greedy: Callable[[Any], Verifier] = field(default=lambda rule: Greedy())

    @property
    def lossless(self) -> bool:
        """Whether the text has exactly the target's law."""
        return self.rule().lossless

    @property
    def options(self) -> dict[str, Option]:
        """What can be set, by name."""
        return options_of(self.drafter) | options_of(self.rule)

    def recipe(self, options: Mapping[str, object] | None = None) -> Recipe:
        """The method with these options, the others at their defaults.

        Raises:
            InvalidParameterError: an unknown option, or a value outside its domain.
        """
        values = resolve(f"method {self.name!r}", self.options, options or {})
        mine = {name: values[name] for name in options_of(self.rule) if name in values}
        rule = self.rule(**mine)
        theirs = {name: values[name] for name in options_of(self.drafter) if name in values}
        return Recipe(rule, self.greedy(rule), lambda parts: self.drafter(parts, **theirs))


def _no_draft(parts: Parts) -> NoDraft:
    return NoDraft()


def _chain(parts: Parts) -> ModelDrafter:
    assert parts.draft is not None
    return ModelDrafter(parts.draft, parts.target.num_tokens, parts.draft_confidence)


def _chain_with_logits(parts: Parts) -> ModelDrafter:
    assert parts.draft is not None
    return ModelDrafter(
        parts.draft, parts.target.num_tokens, parts.draft_confidence, keep_logits=True
    )


def _coupled_chain(parts: Parts) -> ModelDrafter:
    assert parts.draft is not None
    return ModelDrafter(
        parts.draft, parts.target.num_tokens, parts.draft_confidence, picker=COUPLED
    )


def _bild(parts: Parts, *, fallback: float = 0.6, mode: str = "original") -> ModelDrafter:
    """In the MJSD variant the unsure token is kept and verified: the confidence stop."""
    assert parts.draft is not None
    if mode == "original":
        return BildDrafter(parts.draft, parts.target.num_tokens, fallback)
    return ModelDrafter(parts.draft, parts.target.num_tokens, fallback)


_LEVIATHAN = "Leviathan et al., ICML 2023; Chen et al., 2023"
_DRAFT = "draft model"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "plain",
            "The target alone, one token per pass.",
            "autoregressive sampling",
            "nothing",
            Coupled,
            _no_draft,
        ),
        Method(
            "speculative",
            "A draft model's chain, judged by rejection sampling.",
            _LEVIATHAN,
            _DRAFT,
            Rejection,
            _chain,
        ),
        Method(
            "block",
            "A draft model's chain, judged as a whole; no rule keeps more of it on average.",
            "Sun et al., ICLR 2025",
            _DRAFT,
            Block,
            _chain,
        ),
        Method(
            "greedy",
            "A draft model's chain, kept while it is the target's argmax; temperature 0 only.",
            _LEVIATHAN,
            _DRAFT,
            Greedy,
            _chain,
        ),
        Method(
            "sample-match",
            "The target draws its own tokens; the draft's are kept while they are equal.",
            "Miao et al., ASPLOS 2024; assisted generation in transformers",
            _DRAFT,
            SampleMatch,
            _chain,
        ),
        Method(
            "coupled",
            "Draft and target share their noise: the text of plain with the same seed, faster.",
            "Daliri et al., 2024",
            _DRAFT,
            Coupled,
            _coupled_chain,
        ),
        Method(
            "mentored",
            "Accepts the most that a bound on the divergence per token allows.",
            "Tran-Thien, 2023",
            _DRAFT,
            Mentored,
            _chain,
        ),
        Method(
            "lenience",
            "Rejection sampling with the target's law divided by the lenience.",
            "Leviathan et al., ICML 2023, appendix A.5",
            _DRAFT,
            Lenience,
            _chain,
        ),
        Method(
            "ensemble",
            "Samples from a fixed mixture of the target's and the draft's law.",
            "DIVERSE, arXiv 2604.07622; transformers' assistant_ensemble_weight",
            _DRAFT,
            Ensemble,
            _chain_with_logits,
            lambda rule: EnsembleGreedy(rule.weight),
        ),
        Method(
            "cascade",
            "Keeps the draft's law where a deferral rule trusts it, else the target's.",
            "Narasimhan et al., ICLR 2025",
            _DRAFT,
            Cascade,
            _chain_with_logits,
            lambda rule: CascadeGreedy(rule.deferral, rule.alpha),
        ),
        Method(
            "relaxed",
            "Keeps tokens among the target's best, within a distance of the best one.",
            "relaxed acceptance of TensorRT-LLM, 2025",
            _DRAFT,
            Relaxed,
            _chain,
            lambda rule: RelaxedGreedy(rule.top_k, rule.delta),
        ),
        Method(
            "typical",
            "Keeps tokens that are not improbable for the entropy of the target's law.",
            "Cai et al. (Medusa), ICML 2024",
            _DRAFT,
            Typical,
            _chain,
        ),
        Method(
            "bild",
            "The draft writes while it is sure; tokens that surprise the target are rolled back.",
            "Kim et al., NeurIPS 2023",
            _DRAFT,
            Bild,
            _bild,
            lambda rule: rule if rule.mode == "original" else Greedy(),
        ),
    )
}


def find_method(name: str) -> Method:
    """The method of that name.

    Raises:
        UnknownMethodError: naming the nearest one.
    """
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownMethodError(f"unknown method {name!r}: {hint}known: {', '.join(METHODS)}")
