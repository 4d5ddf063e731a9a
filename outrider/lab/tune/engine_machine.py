"""The machine with real models: engines of ``lab/bench``, and the clock.

Legend: B rows, N query tokens.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core import Context, Draft, Round
from outrider.core.errors import IncompatibleError, PromptError
from outrider.engine import Engine
from outrider.engine.measured_divergence import is_measurable
from outrider.engine.request import Row
from outrider.engine.round_observer import RowRound as EngineRound
from outrider.lab.bench.engines import Engines
from outrider.lab.bench.measure import Asked, Clock, as_prompt, run_batch
from outrider.lab.bench.method_spec import MethodSpec
from outrider.lab.bench.plan import BenchPlan
from outrider.lab.bench.record import BatchRecord
from outrider.lab.data import DataSet
from outrider.lab.quality.metrics import references
from outrider.lab.tune.machine import Run, Source
from outrider.lab.tune.quality import Quality, QualityFloor, assess
from outrider.sampling import Sampling, Warp

_PASSES, _PASS_SECONDS = 5, 0.05  # timed repeats of a forward pass, and their time; at least
_COPIES = 1 << 20  # so that two rows with the same prompt have different random numbers


class EngineMachine:
    """Decodes a data set's prompts.

    Attributes:
        num_prompts: the number of prompts to tune on.
        qualities: how good the outputs of lossy sources are, by name.

    Args:
        engines: of the plan's models.
        plan: how they run; its first temperature is that of the sampling.
        data: the prompts, as the target reads them.
        num_held_out: how many of the last prompts are for :meth:`outputs` alone.
        divergence_budget: the most KL(p‖π) per token, in nats, that a lossy source may have; None
            sets no bound.
        quality: what the outputs of a lossy source have to reach; None demands nothing. Without
            either, no lossy source is allowed.
        quality_seconds: after which the comparison of a source's outputs ends, decided or not.
        clock: in seconds.

    Raises:
        PromptError: a prompt that cannot be encoded, or that has a single token.
        MissingReferenceError: a prompt without the reference that ``quality`` needs.
    """

    def __init__(
        self,
        engines: Engines,
        plan: BenchPlan,
        data: DataSet,
        *,
        num_held_out: int = 0,
        divergence_budget: float | None = None,
        quality: QualityFloor | None = None,
        quality_seconds: float = math.inf,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.engines = engines
        self.clock = clock
        self._plan = plan
        self._examples = [replace(each, later=()) for each in data]
        self.num_prompts = len(self._examples) - num_held_out
        self._budget, self._quality = divergence_budget, quality
        self._quality_seconds = quality_seconds
        self._references: list[str] = []
        if quality is not None:
            self._references = references(self._examples[: self.num_prompts], quality.metric)
        self.qualities: dict[str, Quality] = {}
        self._plain_texts: dict[int, str] = {}
        self._checked: set[tuple[str, str | None]] = set()  # method and draft
        self._warm: set[tuple[str, str | None, int, int]] = set()
        self._ids = [self._encoded(data, index) for index in range(len(data))]

    @property
    def held_out(self) -> range:
        """The indices of the prompts that nothing is tuned on."""
        return range(self.num_prompts, len(self._examples))

    def is_lossless(self, spec: MethodSpec) -> bool:
        """Whether a method keeps the target's distribution at the plan's temperature."""
        return spec.lossless_at(self._plan.temperatures[0])

    def source(self, name: str, method: str, draft: str | None, longest: int) -> Source:
        """A source with the draft lengths that its drafter can have.

        Args:
            name: in answers.
            method: as ``outrider bench`` writes it.
            draft: its draft model or head.
            longest: the longest chain to consider.

        Raises:
            OutriderError: the method does not fit the target or the draft.
        """
        spec = MethodSpec.parse(method)
        engine = self.engines.engine(spec, draft, spec.gamma)
        able = engine.drafter.capabilities
        if spec.gamma is not None or able.drafts_trees:
            return Source(name, method, draft, (engine.num_speculative_tokens,))
        most = longest if able.depth is None else min(longest, able.depth)
        fades = spec.method.needs_head is not None
        return Source(name, method, draft, tuple(range(1, most + 1)), fades)

    def pass_seconds(self, num_rows: int, width: int) -> float:
        """Median seconds of a forward pass of the target over ``width`` tokens of each row."""
        target = self.engines.plain.target
        with torch.inference_mode():
            context = self._context(num_rows)
            cache = target.start(context)
            tokens_BN = context.root_B[:, None].expand(num_rows, width)
            mask_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
            draft = Draft.chain(tokens_BN, mask_BN, None, "chosen")
            seconds: list[float] = []
            while len(seconds) <= _PASSES or sum(seconds[1:]) < _PASS_SECONDS:
                began = self.clock()
                target.score(cache, draft)
                self._wait()
                seconds.append(self.clock() - began)  # the first is warm-up
        return statistics.median(seconds[1:])

    def run(
        self,
        source: Source,
        length: int,
        batches: Sequence[Sequence[int]],
        max_new_tokens: int,
        seed: int,
    ) -> Run:
        """Decodes batches of prompts; see :class:`~outrider.lab.tune.machine.Machine`."""
        spec = MethodSpec.parse(source.method)
        engine = self.engines.engine(spec, source.draft, length or None)
        sampling = self._sampling(max_new_tokens, seed)
        self._check_lossy(source, spec, length, batches[0], sampling)
        self._warm_up(source, engine, length, batches[0], sampling)
        records, depths = [], []
        for prompts in batches:
            with _depths(engine) as found:
                record = self._decoded(engine, prompts, sampling)
            records.append(record)
            depths.append(tuple(tuple(found[number]) for number in sorted(found)))
        return Run(tuple(records), tuple(depths))

    def outputs(self, max_new_tokens: int, seed: int) -> Iterator[list[int]]:
        """What plain decoding makes of the held-out prompts: the last four tokens of each, and its
        output."""
        size = max(self._plan.batch_sizes)
        sampling = self._sampling(max_new_tokens, seed)
        for start in range(0, len(self.held_out), size):
            prompts = self.held_out[start : start + size]
            record = self._decoded(self.engines.plain, prompts, sampling)
            for index, request in zip(prompts, record.requests, strict=True):
                yield [*self._ids[index][-4:], *request.token_ids]

    def _sampling(self, max_new_tokens: int, seed: int) -> Sampling:
        settled = self._plan.sampling(self._plan.temperatures[0])
        return replace(settled, max_new_tokens=max_new_tokens, seed=seed)

    def _decoded(self, engine: Engine, prompts: Sequence[int], sampling: Sampling) -> BatchRecord:
        """The record of a batch, whose requests have the indices of their prompts."""
        asked = [
            Asked(slot * _COPIES + prompt, 0, self._examples[prompt])
            for slot, prompt in enumerate(prompts)
        ]
        record = run_batch(engine, asked, sampling, self.clock)
        pairs = zip(record.requests, prompts, strict=True)
        requests = tuple(replace(request, example=prompt) for request, prompt in pairs)
        return BatchRecord(record.seconds, requests)

    def _warm_up(
        self,
        source: Source,
        engine: Engine,
        length: int,
        prompts: Sequence[int],
        sampling: Sampling,
    ) -> None:
        """Runs a few untimed rounds, once per source, length and batch size."""
        state = source.method, source.draft, length, len(prompts)
        if state not in self._warm:
            self._warm.add(state)
            self._decoded(engine, prompts, replace(sampling, max_new_tokens=2 * length + 3))

    def _check_lossy(
        self,
        source: Source,
        spec: MethodSpec,
        length: int,
        prompts: Sequence[int],
        sampling: Sampling,
    ) -> None:
        """Raises IncompatibleError for a lossy source that is not as good as the user demands."""
        checked = source.method, source.draft
        if self.is_lossless(spec) or checked in self._checked:
            return
        if self._budget is None and self._quality is None:
            raise IncompatibleError(
                f"{source.name} changes the distribution of the output: give a divergence budget "
                f"or a metric of quality, or leave it out"
            )
        if self._budget is not None:
            engine = self.engines.engine(spec, source.draft, length, measure=True)
            self._check_divergence(source, engine, self._budget, prompts, sampling)
        if self._quality is not None:
            engine = self.engines.engine(spec, source.draft, length)
            self._check_quality(source, engine, self._quality, sampling)
        self._checked.add(checked)

    def _check_divergence(
        self,
        source: Source,
        engine: Engine,
        budget: float,
        prompts: Sequence[int],
        sampling: Sampling,
    ) -> None:
        rule = engine.verifier_at(self._plan.temperatures[0])
        if not is_measurable(rule) or engine.drafter.capabilities.drafts_trees:
            raise IncompatibleError(
                f"{source.name}: how far it diverges from the target cannot be measured, so no "
                f"budget bounds it: pass a metric of quality instead, or leave it out"
            )
        record = self._decoded(engine, prompts, sampling)
        totals = [request.total() for request in record.requests]
        emitted = sum(total.emitted for total in totals)
        divergence = sum(total.kl for total in totals) / emitted
        if divergence > budget:
            raise IncompatibleError(
                f"{source.name} diverges by {divergence:.3g} nats per token, more than the budget "
                f"of {budget:g}"
            )

    def _check_quality(
        self, source: Source, engine: Engine, floor: QualityFloor, sampling: Sampling
    ) -> None:
        """Compares whole outputs: probes may be shorter, and would then miss their answers."""
        sampling = replace(sampling, max_new_tokens=self._plan.max_new_tokens)
        end = self.clock() + self._quality_seconds
        found = assess(
            floor,
            self._references,
            lambda prompts: self._texts(self.engines.plain, prompts, sampling),
            lambda prompts: self._texts(engine, prompts, sampling),
            lambda: self.clock() < end,
        )
        self.qualities[source.name] = found
        if not found.holds:
            raise IncompatibleError(
                f"{source.name}: {found}, less than the {floor.at_least:g} that is demanded"
            )

    def _texts(self, engine: Engine, prompts: Sequence[int], sampling: Sampling) -> list[str]:
        """The outputs for prompts; those of plain decoding are decoded once."""
        known = self._plain_texts if engine is self.engines.plain else {}
        missing = [prompt for prompt in prompts if prompt not in known]
        size = max(self._plan.batch_sizes)
        for start in range(0, len(missing), size):
            record = self._decoded(engine, missing[start : start + size], sampling)
            known.update({request.example: request.text for request in record.requests})
        return [known[prompt] for prompt in prompts]

    def _context(self, num_rows: int) -> Context:
        """A batch of the first prompts."""
        target = self.engines.plain.target
        ids = [list(self._ids[index % len(self._ids)]) for index in range(num_rows)]
        distribution = Warp([Sampling()] * num_rows, target.num_tokens, target.device)
        sources = None
        if target.decoder_prompt is not None:
            sources, ids = ids, [list(target.decoder_prompt)] * num_rows
        numbers = [0] * num_rows
        return Context.start(ids, distribution, numbers, range(num_rows), target.device, sources)

    def _encoded(self, data: DataSet, index: int) -> tuple[int, ...]:
        example = self._examples[index]
        try:
            ids = self.engines.plain.encode(as_prompt(example))
        except PromptError as error:
            raise PromptError(f"data set {data.name}, example {example.id!r}: {error}") from None
        if len(ids) < 2:
            raise PromptError(
                f"data set {data.name}, example {example.id!r}: the prompt has a single token, "
                f"which says nothing about the texts that the model will get: leave it out, or "
                f"give a longer one"
            )
        return ids

    def _wait(self) -> None:
        if self.engines.target.device.type == "cuda":
            torch.cuda.synchronize(self.engines.target.device)


class _DepthObserver:
    """Notes the length of each draft, by the number of its request."""

    def __init__(self) -> None:
        self.depths: dict[int, list[int]] = defaultdict(list)

    @property
    def blocks(self) -> Sequence[Tensor]:
        """Nothing but the counts that the engine copies anyway."""
        return ()

    def round(self) -> AbstractContextManager[None]:
        """Nothing to do around a round."""
        return nullcontext()

    def observe(self, round_: Round, rows: Sequence[Row]) -> _DepthObserver:
        """The observer itself, which reads the counts."""
        return self

    def read(self, done: EngineRound, line: Sequence[list[float]]) -> None:
        """Notes a row's draft."""
        self.depths[done.row.request.number].append(done.counts.depth)


@contextmanager
def _depths(engine: Engine) -> Iterator[dict[int, list[int]]]:
    """Within it, the lengths of the engine's drafts are noted by the number of the request, which
    rises from slot to slot of a batch."""
    before, observer = engine.observed.observer, _DepthObserver()
    engine.observed.observer = observer
    try:
        yield observer.depths
    finally:
        engine.observed.observer = before
