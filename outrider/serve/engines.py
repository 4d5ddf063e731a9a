"""An engine per method that is in use, all on the models of the first. Where a governor chooses the
draft lengths of the first, the others have governors of their own, where their lengths may be
chosen.

Requests of one engine share batches; an engine of another method has batches of its own, and the
worker runs a step of each in turn.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal, get_origin

from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.engine import Engine
from outrider.engine.settings import AUTO, LengthPolicy
from outrider.methods import METHODS, Method, find_method
from outrider.methods.copying import PREDICTED
from outrider.serve.errors import ApiError
from outrider.serve.fields import SpeculationFields
from outrider.serve.worker import Worker

BUDGETED = "mentored"
"""The method of requests that name a divergence budget and no method."""

_Key = tuple[str, tuple[tuple[str, object], ...]]


class EnginePool:
    """The engines of a server.

    Args:
        engine: the engine of requests that choose no method; it is never dropped.
        worker: runs them.
        max_engines: most engines; the one that was unused for longest makes room for a new one.
    """

    def __init__(self, engine: Engine, worker: Worker, max_engines: int) -> None:
        self.default = engine
        self._worker = worker
        self._max_engines = max_engines
        self._others: OrderedDict[_Key, Engine] = OrderedDict()

    @property
    def engines(self) -> list[Engine]:
        """All of them, the default one first."""
        return [self.default, *self._others.values()]

    def find(self, fields: SpeculationFields, *, predicts: bool = False) -> Engine:
        """The engine for a request, which is made if need be. The worker calls it, between two
        steps.

        Args:
            fields: what the request says of its decoding.
            predicts: whether it has an expected output.

        Raises:
            ApiError: the request contradicts itself, or no more engines may be made now.
            OutriderError: a method that does not exist, does not fit the models, or does not have
                such options.
        """
        if predicts:
            if fields.method is not None or fields.divergence_budget is not None:
                raise ApiError(
                    "prediction: the expected output is drafted by a method of its own: leave out "
                    "method and divergence_budget",
                    param="prediction",
                )
            return self._engine(PREDICTED, {})
        options: dict[str, object] = dict(fields.method_options or {})
        name = fields.method
        if fields.divergence_budget is not None:
            name = name or (self.default.method.name if self._has_budget() else BUDGETED)
            if "budget" in options:
                raise ApiError(
                    "divergence_budget: method_options has a budget, too: give it once",
                    param="divergence_budget",
                )
            options["budget"] = fields.divergence_budget
        if name is None and options:
            name = self.default.method.name
        if name is None or (name == self.default.method.name and not options):
            return self.default
        method = find_method(name)
        self._check(method)
        self._check_options(method, options, fields.divergence_budget is not None)
        return self._engine(method, options)

    def may_choose(self, method: Method) -> bool:
        """Whether a request may name a method: its models are loaded, and it reads no file."""
        if method.name == self.default.method.name:
            return True
        try:
            self._check(method)
        except ApiError:
            return False
        has_draft = self.default.draft is not None
        return self._max_engines > 1 and (has_draft or not method.needs_draft)

    def _has_budget(self) -> bool:
        return "budget" in self.default.method.options

    def _check(self, method: Method) -> None:
        """Raises an error for methods that a request may not choose: those that read files, and
        those with heads that are not loaded."""
        if method.needs == "n-gram file":
            raise ApiError(
                f"method {method.name!r} reads a file, which only the server's operator may name",
                param="method",
            )
        if method.needs_head and method.needs_head != self.default.method.needs_head:
            raise ApiError(
                f"method {method.name!r} drafts with a head of kind {method.needs_head!r}, and "
                f"the server has none",
                param="method",
            )

    def _check_options(
        self, method: Method, options: Mapping[str, object], has_budget: bool
    ) -> None:
        """Raises an error for a budget that the method does not have, and for options that are the
        operator's."""
        known = method.options
        if has_budget and "budget" not in known:
            able = ", ".join(name for name, each in METHODS.items() if "budget" in each.options)
            raise ApiError(
                f"divergence_budget: method {method.name!r} has no budget; methods that have: "
                f"{able}",
                param="divergence_budget",
            )
        for name in options:
            option = known.get(name)
            if option is None:
                continue  # the method's own error names those that it has
            if option.type not in (int, float, bool) and get_origin(option.type) is not Literal:
                raise ApiError(
                    f"method_options.{name}: only the server's operator may set it",
                    param="method_options",
                )

    def _engine(self, method: Method, options: Mapping[str, object]) -> Engine:
        key = method.name, tuple(sorted(options.items()))
        if key in self._others:
            self._others.move_to_end(key)
            return self._others[key]
        self._make_room()
        try:
            engine = self.default.with_method(
                method, options, num_speculative_tokens=self._length_policy(method)
            )
        except (IncompatibleError, InvalidParameterError) as error:
            param = "method_options" if "option" in str(error) else "method"
            raise ApiError(str(error), param=param) from error
        self._others[key] = engine
        return engine

    def _length_policy(self, method: Method) -> LengthPolicy | None:
        """How draft lengths of another method are chosen: as the default's, but a governor that
        nobody asked for leaves outputs that depend on them alone."""
        policy = self.default.length_policy
        return policy if policy == AUTO or method.outputs_ignore_lengths else None

    def _make_room(self) -> None:
        if self._max_engines == 1:
            raise ApiError(
                "this server does not let requests choose a method: leave out method, "
                "method_options, divergence_budget and prediction",
                param="method",
                code="method_not_available",
            )
        if len(self._others) + 1 < self._max_engines:
            return
        for key, engine in self._others.items():
            if self._worker.is_idle(engine):
                del self._others[key]
                return
        raise ApiError(
            f"{self._max_engines} methods are in use, and no more may be at the same time: try "
            f"again, or choose one of them",
            status=429,
            param="method",
            headers={"Retry-After": "1"},
        )
