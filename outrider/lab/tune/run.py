"""Tunes the models of a plan: loads them, builds the candidates, and runs the tuner."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.core.errors import InvalidParameterError
from outrider.lab.bench.engines import Engines, Given
from outrider.lab.bench.measure import Clock
from outrider.lab.bench.plan import EMBEDDED, BenchPlan
from outrider.lab.data import DataSet, as_prompts, chosen, read_data
from outrider.lab.tune.engine_machine import EngineMachine
from outrider.lab.tune.quality import QualityFloor, with_references
from outrider.lab.tune.sources import LONGEST, BuildTable, candidates, count_answers
from outrider.lab.tune.tuner import Tuner
from outrider.lab.tune.tuning import TuneSettings

HELD_OUT = 8
"""With as many prompts as this, a quarter of them is left for counting an n-gram table."""
_COUNTING = 0.1  # share of the time
_ASSESSING = 0.1  # of the time, for each lossy source

Report = Callable[[str, float], None]
"""Called with what is being done, and the share of the time that is over."""


@dataclass(frozen=True)
class Candidates:
    """What there is to choose from.

    Attributes:
        drafts: draft models and heads; the embedded target has its own.
        methods: if there are any, these alone; otherwise everything that works.
        longest: the longest chain to consider.
        divergence_budget: the most KL(p‖π) per token, in nats, of a lossy method; None sets no
            bound.
        quality: what a lossy method's outputs have to reach; without either, none is allowed.
        ngram_file: where an n-gram table is counted; None counts none.
        build_table: counts it.
    """

    drafts: Sequence[str] = ()
    methods: Sequence[str] = ()
    longest: int = LONGEST
    divergence_budget: float | None = None
    ngram_file: Path | None = None
    build_table: BuildTable | None = None
    quality: QualityFloor | None = None


def tuner_of(
    plan: BenchPlan,
    settings: TuneSettings,
    given: Candidates,
    on_stage: Report = lambda stage, share: None,
    *,
    models: Mapping[str, Given] | None = None,
    data: Mapping[str, DataSet] | None = None,
    clock: Clock = time.perf_counter,
) -> Tuner:
    """Loads the models and finds the candidates.

    Args:
        plan: names the target, how models run, the prompts, and the temperature.
        settings: what to tune for.
        given: the candidates.
        on_stage: called before each piece of work.
        models: models in memory, by the names that the plan uses.
        data: data sets in memory, by the names that the plan uses.
        clock: in seconds. The time begins now, so loading and compiling count.

    Raises:
        OutriderError: models, data or settings that do not work.
    """
    began = clock()
    prompts = _read(plan, data or {}, given.quality)
    engines = Engines(plan, models or {}, lambda stage: on_stage(stage, 0.0))
    prompts = as_prompts(prompts, plan.data[0].prompts, engines.target)
    counts = given.build_table is not None and not given.methods and len(prompts) >= HELD_OUT
    machine = EngineMachine(
        engines,
        replace(plan, max_new_tokens=settings.max_new_tokens),
        prompts,
        num_held_out=len(prompts) // 4 if counts else 0,
        divergence_budget=given.divergence_budget,
        quality=given.quality,
        quality_seconds=_ASSESSING * 60 * settings.minutes,
        clock=clock,
    )
    file = given.ngram_file
    if counts and file is not None and given.build_table is not None:
        on_stage("counting the target's answers", 0.0)
        file = count_answers(
            machine,
            file,
            given.build_table,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
            seconds=_COUNTING * 60 * settings.minutes,
            clock=clock,
        )
    errors: dict[str, str] = {}
    sources = candidates(
        machine,
        given.drafts or ((EMBEDDED,) if plan.target == EMBEDDED else ()),
        given.methods,
        longest=given.longest,
        divergence_budget=given.divergence_budget,
        has_metric=given.quality is not None,
        ngram_file=file if counts else None,
        errors=None if given.methods else errors,
    )
    tuner = Tuner(machine, sources, settings, on_stage, began)
    tuner.tuning.errors |= errors
    tuner.tuning.sampling = engines.plain.settled(plan.sampling(plan.temperatures[0]))
    return tuner


def _read(
    plan: BenchPlan, given: Mapping[str, DataSet], quality: QualityFloor | None = None
) -> DataSet:
    """The prompts of all data sets of the plan, as one.

    Raises:
        InvalidParameterError: references in a file of their own for several data sets.
    """
    sets = []
    file = None if quality is None else quality.references
    if file is not None and len(plan.data) > 1:
        raise InvalidParameterError(
            f"references={str(file)!r}: there are {len(plan.data)} data sets: put the references "
            f"into their records, or tune on one data set"
        )
    for spec in plan.data:
        data = given[spec.source] if spec.source in given else read_data(spec.source, spec.name)
        data = data if file is None else with_references(data, file)
        sets.append(chosen(data, spec.tasks, spec.limit))
    if len(sets) == 1:
        return sets[0]
    examples = tuple(example for each in sets for example in each)
    name, sources = (
        " and ".join(getattr(each, what) for each in sets) for what in ("name", "source")
    )
    return DataSet(name, examples, " ".join(each.sha256 for each in sets), sources, sets[0].layout)
