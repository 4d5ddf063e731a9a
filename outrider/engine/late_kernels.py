"""Models that run without kernels at first: on a machine where the kernels are yet to be compiled,
requests need not wait for that.

Without kernels, models run as ``transformers`` runs them. Their sums are rounded elsewhere, so the
kernels are taken over while no request runs (``background.py``).
"""

import warnings
from collections.abc import Callable

from outrider.core.errors import KernelError, OutriderWarning
from outrider.drafters.heads.head_model import HeadModel
from outrider.engine.background import KERNELS
from outrider.engine.engine import Engine
from outrider.engine.warming import Stage
from outrider.runtime import HFModel
from outrider.runtime.executors.compile_cache import uses_kernels
from outrider.runtime.executors.prepare import prepare_without_kernels


class LateKernels:
    """The models of an engine that get their kernels later."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._todo: list[Callable[[], None]] = []

    def prepare(self, model: HFModel, compile: str, *, exact: bool, own: bool) -> None:
        """Sets up how a model runs, without kernels. Arguments as of ``prepare.prepare``; ``exact``
        is False."""
        assert not exact
        self._names.append(model.name)
        self._todo.append(prepare_without_kernels(model, compile, own=own))

    def add_heads(self, engine: Engine) -> None:
        """Lets the heads that draft for the engine have kernels when its target has, and those of
        engines that are made of it (``Engine.with_method``)."""
        engine.late_kernels = self
        for model in engine.drafter.capabilities.models:
            if isinstance(model, HeadModel) and not uses_kernels(model.module):
                self._names.append(model.name)
                self._todo.append(model.use_kernels)

    @property
    def stage(self) -> Stage:
        """Taking over the kernels once they are compiled."""
        return Stage("kernels", self.use, exact=False, number=KERNELS)

    def use(self) -> None:
        """Lets the models use the kernels, which are compiled now if they are missing. Warns where
        they cannot be compiled."""
        try:
            while self._todo:
                self._todo[0]()
                del self._todo[0]
        except KernelError as error:
            names = " and ".join(dict.fromkeys(self._names))
            warnings.warn(f"{names} run eagerly: {error}", OutriderWarning, stacklevel=2)
