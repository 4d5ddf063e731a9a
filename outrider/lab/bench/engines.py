"""The models of a plan, each loaded once, and an engine per method, draft and draft length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from outrider import assets
from outrider.core.errors import IncompatibleError
from outrider.drafters.heads.head import Head
from outrider.drafters.heads.kinds import format_of
from outrider.engine import Engine
from outrider.engine.warming import warm_up
from outrider.lab.bench.method_spec import MethodSpec
from outrider.lab.bench.plan import EMBEDDED, BenchPlan
from outrider.runtime import HFModel, load_model
from outrider.runtime.executors.prepare import prepare
from outrider.runtime.hf.fingerprint import fingerprint
from outrider.runtime.kv_cache.storage import KvDtype

Given = HFModel | PreTrainedModel | Head
"""A model in memory, or a head."""
Report = Callable[[str], None]


class Engines:
    """Engines by method, draft and draft length; they share the models.

    Args:
        plan: names the models and how they run.
        models: models in memory by the names that the plan uses.
        report: called with what is being loaded or compiled.

    Attributes:
        target: the loaded target.
        target_fingerprint: a hash of its weights.
    """

    def __init__(
        self, plan: BenchPlan, models: Mapping[str, Given], report: Report = lambda stage: None
    ) -> None:
        self._plan = plan
        self._given = models
        self._report = report
        self._drafts: dict[str, HFModel | Head] = {}
        self._engines: dict[tuple[Any, ...], Engine] = {}
        self._fingerprints: dict[str, str] = {}
        self.target, self.target_fingerprint = self._model(
            plan.target, "target", plan.quantize_target
        )

    def drafts_of(self, spec: MethodSpec) -> list[str | None]:
        """The names of the drafts that a method runs with; loads them.

        Raises:
            IncompatibleError: none of the plan's is of the kind that it needs.
        """
        names = self._plan.drafts_of(spec)
        found = [name for name in names if name is None or self._fits(spec, name)]
        if not found:
            raise IncompatibleError(
                f"method {str(spec)!r} needs "
                f"{'a draft model' if spec.method.needs_draft else 'a head'}, and none of "
                f"{', '.join(map(str, names))} is one: add one to drafts"
            )
        return found

    def draft(self, name: str | None) -> HFModel | Head | None:
        """A draft by its name."""
        if name is None:
            return None
        if name not in self._drafts:
            self._drafts[name], self._fingerprints[name] = self._load_draft(name)
        return self._drafts[name]

    def fingerprint_of(self, name: str | None) -> str | None:
        """A hash of a draft's weights; None without a draft."""
        if self.draft(name) is None:
            return None
        assert name is not None
        return self._fingerprints[name]

    def engine(
        self, spec: MethodSpec, draft: str | None, gamma: int | None, *, measure: bool = False
    ) -> Engine:
        """The engine of a method; built and compiled when it is first asked for.

        Args:
            spec: the method.
            draft: the name of its draft.
            gamma: its draft length; None is its own.
            measure: measure the divergence of a lossy rule, which takes time.
        """
        key = str(spec), draft, gamma, measure
        if key not in self._engines:
            plan = self._plan
            engine = Engine(
                self.target,
                self.draft(draft),
                spec.method,
                num_speculative_tokens=gamma,
                draft_confidence=spec.draft_confidence,
                draft_length=spec.draft_length,
                max_batch_size=max(plan.batch_sizes),
                kv_dtype=cast("KvDtype", plan.kv_dtype),
                options=spec.options,
                measure=measure,
                generation_config=plan.generation_config,
            )
            warm_up(engine, lambda stage, share: self._report(stage))
            self._engines[key] = engine
        return self._engines[key]

    @property
    def plain(self) -> Engine:
        """Plain decoding, which encodes prompts as every engine does."""
        return self.engine(MethodSpec("plain"), None, None)

    def _fits(self, spec: MethodSpec, name: str) -> bool:
        draft = self.draft(name)
        kind = draft.kind if isinstance(draft, Head) else None
        return kind == spec.method.needs_head

    def _load_draft(self, name: str) -> tuple[HFModel | Head, str]:
        given = self._given.get(name)
        if isinstance(given, Head) and not isinstance(given, HFModel):
            return self._rounded(given), _fingerprint_of_head(given)
        head = None if given is not None else format_of(name)
        if head is not None:
            self._report(f"loading head {name}")
            loaded = head.load(name, self.target)
            return self._rounded(loaded), _fingerprint_of_head(loaded)
        return self._model(name, "draft", self._plan.quantize_draft)

    def _rounded(self, head: Head) -> Head:
        kind = self._plan.quantize_draft
        return head if kind is None else head.in_few_bits(kind)

    def _model(self, name: str, role: str, quantized: str | None) -> tuple[HFModel, str]:
        """A model, and the fingerprint of its weights as they are before our kernels pack them."""
        plan, given = self._plan, self._given.get(name)
        self._report(f"loading {role} {name}")
        assert not isinstance(given, Head) or isinstance(given, HFModel)
        model = load_model(
            _source(name, role) if given is None else given,
            dtype=plan.dtype,
            device=plan.device,
            trust_remote_code=plan.trust_remote_code,
            role=role,
            quantized=quantized,
        )
        weights = fingerprint(model.module)
        if model.compiled is None:
            prepare(model, plan.compile, exact=plan.exact, own=given is None)
        return model, weights


def _fingerprint_of_head(head: Head) -> str:
    modules = (each for each in vars(head).values() if isinstance(each, nn.Module))
    return "".join(fingerprint(each) for each in modules)


def _source(name: str, role: str) -> str:
    if name != EMBEDDED:
        return name
    return str(assets.target_path() if role == "target" else assets.draft_path())
