"""How one request is speculated on, where it differs from its engine.

Requests of one batch share the engine's drafts. Each of them may have fewer drafted tokens, none at
all, or another verification rule: that of any method that verifies the same drafts. A lossy rule's
budget is the request's own, too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.core.protocols import Verifier
from outrider.core.values import as_python, is_whole, shown
from outrider.methods import Method, Recipe, find_method
from outrider.options import options_of
from outrider.verifiers import Greedy

PLAIN = "plain"
BUDGET = "budget"


@dataclass(frozen=True)
class Speculation:
    """Settings of one request; what is None is the engine's.

    Attributes:
        num_speculative_tokens: most tokens drafted per round, from 0, which drafts nothing, to the
            engine's γ.
        method: the name of the method whose rule verifies the request's tokens. Its drafts must be
            those of the engine's method. ``plain`` drafts nothing, and gives the tokens that an
            engine of that method gives.
        options: the options of that method's rule, or of the engine's method, by name.
        divergence_budget: the option ``budget`` of a lossy rule that has one, such as ``mentored``:
            how far each token's distribution may be from the target's.
    """

    num_speculative_tokens: int | None = None
    method: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    divergence_budget: float | None = None


@dataclass(frozen=True)
class Speculated:
    """What a request's settings come to.

    Attributes:
        num_speculative_tokens: most tokens drafted per round; None as many as the engine.
        rule: the rule that verifies the request where rows are sampled; None for the engine's.
    """

    num_speculative_tokens: int | None = None
    rule: Verifier | None = None


@dataclass(frozen=True)
class SpeculationReader:
    """Checks requests' settings against their engine.

    Attributes:
        method: the engine's method.
        recipe: the method with its options settled.
        num_speculative_tokens: the engine's γ.
    """

    method: Method
    recipe: Recipe
    num_speculative_tokens: int

    def read(self, speculation: Speculation | None) -> Speculated:
        """A request's settings.

        Raises:
            InvalidParameterError: a value outside its domain, an unknown method or option.
            IncompatibleError: a method that cannot verify the engine's drafts.
        """
        if speculation is None:
            return Speculated()
        most = check_tokens(speculation.num_speculative_tokens, self.num_speculative_tokens)
        options = dict(speculation.options)
        budget = as_python(speculation.divergence_budget)
        if budget is not None:
            self._check_has_budget(speculation.method)
            options[BUDGET] = budget
        if speculation.method is None and not options:
            return Speculated(most)
        method = self.method if speculation.method is None else find_method(speculation.method)
        rule = self._rule(method, options)
        return Speculated(0 if method.name == PLAIN else most, rule)

    def _rule(self, method: Method, options: Mapping[str, object]) -> Verifier:
        recipe = method.recipe(options)
        others = sorted(set(options) - set(options_of(method.rule)))
        if others:
            raise InvalidParameterError(
                f"option {others[0]!r} of method {method.name!r} changes the drafts, which all "
                f"requests of an engine share: set it when the engine is loaded"
            )
        same = method.drafter is self.method.drafter or method.name == PLAIN
        if not same:
            raise IncompatibleError(
                f"method {method.name!r} does not draft as this engine's, {self.method.name!r}, "
                f"does, and a batch has one drafter: load an engine with method={method.name!r}"
            )
        for each, of in ((self.recipe, self.method), (recipe, method)):
            by_distribution = each.verifier.needs == "distribution"
            if not by_distribution or not isinstance(each.greedy_verifier, Greedy):
                raise IncompatibleError(
                    f"method {of.name!r} verifies whole batches by a rule of its own, so that "
                    f"requests of one engine cannot mix {self.method.name!r} and {method.name!r}: "
                    f"load an engine with method={method.name!r}"
                )
        return recipe.verifier

    def _check_has_budget(self, name: str | None) -> None:
        method = self.method if name is None else find_method(name)
        if BUDGET not in method.options:
            raise InvalidParameterError(
                f"divergence_budget: method {method.name!r} has no bound on the divergence: take "
                f"method='mentored', or leave divergence_budget out"
            )


def check_tokens(number: object, most: int) -> int | None:
    """A request's draft length.

    Raises:
        InvalidParameterError: neither None nor a whole number from 0 to ``most``.
    """
    number = as_python(number)
    if number is None:
        return None
    if not (is_whole(number) and 0 <= number <= most):  # type: ignore[operator]
        raise InvalidParameterError(
            f"num_speculative_tokens={shown(number)}: must be a whole number from 0 (off) to "
            f"{most}, the engine's"
        )
    return int(number)  # type: ignore[call-overload]


def read_speculations(given: object, num_prompts: int) -> list[Speculation | None]:
    """The settings of each prompt, from one for all or one for each; None for the engine's.

    Raises:
        InvalidParameterError: what is no :class:`Speculation`, or another number of them.
    """
    given = as_python(given)
    if given is None or isinstance(given, Speculation):
        return [given] * num_prompts
    listed = list(given) if isinstance(given, Iterable) else [given]
    wrong = [each for each in listed if each is not None and not isinstance(each, Speculation)]
    if wrong or not isinstance(given, Iterable):
        raise InvalidParameterError(
            f"speculation={shown(wrong[0] if wrong else given)}: must be outrider.Speculation, or "
            f"None; write Speculation(num_speculative_tokens=0)"
        )
    if len(listed) != num_prompts:
        raise InvalidParameterError(
            f"{len(listed)} speculation settings for {num_prompts} prompts: give one for all, or "
            f"one for each"
        )
    return [each for each in listed if each is None or isinstance(each, Speculation)]
