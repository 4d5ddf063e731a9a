"""A named method: a drafter and a verification rule, with their options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from outrider.core.errors import IncompatibleError
from outrider.core.protocols import Drafter, Verifier
from outrider.core.round import check_compatible
from outrider.drafters.chain.draft_length import FIXED, DraftLength
from outrider.drafters.chain.stop import Stop
from outrider.drafters.heads.head import Head
from outrider.drafters.within_context import within_context
from outrider.methods.needs import NEEDS_DRAFT, NEEDS_HEAD
from outrider.options import Option, options_of, resolve
from outrider.runtime import HFModel
from outrider.verifiers import Greedy

NUM_SPECULATIVE_TOKENS = 5
"""γ where neither the user nor the drafter sets it."""


@dataclass(frozen=True)
class Parts:
    """What a drafter is built from: the models, and the user's settings of the draft length.

    Attributes:
        target: the model that decides.
        draft: the draft model; None where the method needs none.
        draft_confidence, num_speculative_tokens, draft_length: the user's settings.
        head: the head on the target; None where the method needs none.
        governed: whether a governor chooses the length of each draft.
    """

    target: HFModel
    draft: HFModel | None = None
    draft_confidence: float = 0.0
    num_speculative_tokens: int | None = None
    draft_length: DraftLength = FIXED
    head: Head | None = None
    governed: bool = False

    @property
    def draft_model(self) -> HFModel:
        """The draft model of a method that needs one."""
        assert self.draft is not None
        return self.draft

    @property
    def stop(self) -> Stop | None:
        """The stopping rule for a drafter that applies it itself."""
        return self.draft_length.and_confidence(self.draft_confidence)

    @property
    def lengths_vary(self) -> bool:
        """Whether the lengths of drafts differ, other than at the end of an output."""
        length = self.draft_length
        return self.governed or length.start is not None or length.table is not None

    @property
    def fixed_length(self) -> int:
        """γ, if all drafts have that length but for the last of an output; 0 if lengths adapt. Of
        lengths by the number of rows, the longest."""
        if self.draft_length.start is not None:
            return 0
        if self.draft_length.table is not None and self.num_speculative_tokens is None:
            return self.draft_length.table.most
        return self.num_speculative_tokens or NUM_SPECULATIVE_TOKENS


@dataclass(frozen=True)
class Recipe:
    """A method whose options have values.

    Attributes:
        verifier: the rule for a batch in which some row samples.
        greedy_verifier: the rule for a batch whose rows are all at temperature 0.
        drafter: builds the drafter.
        drafter_options: the values of the drafter's own options, by name.
    """

    verifier: Verifier
    greedy_verifier: Verifier
    drafter: Callable[[Parts], Drafter[Any]]
    drafter_options: Mapping[str, object] = field(default_factory=dict, compare=False)

    @cached_property
    def greedy_only(self) -> bool:
        """Whether it is defined only at temperature 0."""
        return self.verifier.needs != "distribution"

    @cached_property
    def greedy_apart(self) -> bool:
        """Whether greedy requests need batches of their own, because another rule verifies them.

        ``Greedy`` does not: every rule does the same with a point mass.
        """
        return self.greedy_verifier != self.verifier and not isinstance(
            self.greedy_verifier, Greedy
        )

    def build(self, parts: Parts) -> Drafter[Any]:
        """Builds the drafter and checks that the rule can verify its drafts.

        Raises:
            IncompatibleError: it cannot.
        """
        drafter = within_context(self.drafter(parts), parts.target)
        drafter = parts.draft_length.around(drafter)
        check_compatible(drafter, self.verifier)
        return drafter


@dataclass(frozen=True)
class Method:
    """A drafter and a verification rule under a name.

    Attributes:
        name: the name that users type.
        summary: one line for users.
        paper: where it was published.
        needs: what it needs besides a target: "nothing", "draft model", "n-gram file", or "head: "
            and the kind of the head.
        rule: the verifier's class; its parameters are options of the method.
        drafter: builds the drafter from the parts; its keyword-only parameters are options too.
        greedy: makes the rule for a batch at temperature 0 from the rule for other batches.
        stops_when_unsure: whether ``draft_confidence`` can end a draft.
        any_vocabulary: whether draft and target may have different vocabularies.
    """

    name: str
    summary: str
    paper: str
    needs: str
    rule: Callable[..., Verifier]
    drafter: Callable[..., Drafter[Any]]
    greedy: Callable[[Any], Verifier] = field(default=lambda rule: Greedy())
    stops_when_unsure: bool = True
    any_vocabulary: bool = False

    @property
    def needs_draft(self) -> bool:
        """Whether it needs a draft model."""
        return self.needs == "draft model"

    @property
    def needs_head(self) -> str | None:
        """The kind of head that it needs; None where it needs none."""
        word, _, kind = self.needs.partition(": ")
        return kind if word == "head" else None

    def require_draft(self, draft: object) -> None:
        """Raises IncompatibleError without a draft model or head, where the method needs one."""
        if draft is None and self.needs_draft:
            raise IncompatibleError(NEEDS_DRAFT.format(self.name))
        if draft is None and self.needs_head:
            raise IncompatibleError(NEEDS_HEAD.format(self.name))

    def check_draft(self, draft: object) -> None:
        """Raises IncompatibleError for a head where the method needs a model, a model where it
        needs a head, or a head of another kind."""
        kind = draft.kind if isinstance(draft, Head) else None
        name = getattr(draft, "name", draft)
        if self.needs_head not in (None, kind):
            given = "a model" if kind is None else f"a head of kind {kind!r}"
            raise IncompatibleError(
                f"method {self.name!r} drafts with a head of kind {self.needs_head!r}, and {name} "
                f"is {given}: leave out the method, which then follows from the draft"
            )
        if self.needs_draft and kind is not None:
            raise IncompatibleError(
                f"method {self.name!r} drafts with a model, and {name} is a head of kind {kind!r}: "
                f"leave out the method, which then follows from the head"
            )

    @property
    def lossless(self) -> bool:
        """Whether the output has exactly the target's distribution."""
        return self.rule().lossless

    @property
    def outputs_ignore_lengths(self) -> bool:
        """Whether the distribution of its outputs is the same for drafts of any length, chains that
        may end anywhere: a governor may then choose the lengths unasked."""
        return self.lossless and self.stops_when_unsure

    @property
    def options(self) -> dict[str, Option]:
        """The options by name."""
        return options_of(self.drafter) | options_of(self.rule)

    def recipe(self, options: Mapping[str, object] | None = None) -> Recipe:
        """The method with these options and default values for the others.

        Raises:
            InvalidParameterError: an unknown option, or a value outside its domain.
        """
        values = resolve(f"method {self.name!r}", self.options, {} if options is None else options)
        mine = {name: values[name] for name in options_of(self.rule) if name in values}
        rule = self.rule(**mine)
        theirs = {name: values[name] for name in options_of(self.drafter) if name in values}
        return Recipe(rule, self.greedy(rule), partial(self.drafter, **theirs), theirs)
