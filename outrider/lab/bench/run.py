"""Runs a plan: every cell once, then every cell again, until all repeats are done.

Repeat r of every cell comes before repeat r + 1 of any, and the order of the cells within a repeat
is shuffled by the plan's seed, so that a change in the speed of the machine does not favour a
method. Each engine first continues a few examples untimed. A method that copies from earlier
outputs forgets them before each repeat, which has the prompts of the one before. A repeat is
written to the journal as soon as it is over, and is not run again.

The speed-up of a cell is *steady* where its repeats agree so well that another run would give a
ratio within 5 % of it (``ratio.py``). Cells that are not steady are repeated, with their baselines,
up to ``plan.max_repeats``.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from outrider.core import RemembersOutputs
from outrider.core.errors import InvalidParameterError, OutriderError, PromptError
from outrider.imports.garbage import objects_set_aside
from outrider.lab.bench.cell import Cell
from outrider.lab.bench.engines import Engines, Given
from outrider.lab.bench.identity import (
    data_identity,
    environment,
    method_identity,
    shared_identity,
)
from outrider.lab.bench.journal import Journal
from outrider.lab.bench.measure import Clock, as_prompt, run_examples
from outrider.lab.bench.measuring_share import measuring_share, seconds_per_note
from outrider.lab.bench.method_spec import MethodSpec
from outrider.lab.bench.metric import METERS, METRICS, Meter, MetricEntry
from outrider.lab.bench.outputs import Outputs, compute, known
from outrider.lab.bench.plan import BenchPlan, DataSpec
from outrider.lab.bench.progress import OnProgress, Timeline
from outrider.lab.bench.ratio import speedup
from outrider.lab.bench.record import CellResult, Repeat, RequestRecord
from outrider.lab.bench.results import JOURNAL, write_cells
from outrider.lab.bench.samples import samples_of
from outrider.lab.bench.speed import speed_of
from outrider.lab.bench.token_classes import TokenClasses
from outrider.lab.data import DataSet, as_prompts, chosen, read_data, with_forced_references


@dataclass(frozen=True)
class Planned:
    """A cell, and what runs it."""

    cell: Cell
    spec: MethodSpec
    data: DataSet


def run_bench(
    plan: BenchPlan,
    on_progress: OnProgress | None = None,
    *,
    folder: Path | None = None,
    models: Mapping[str, Given] | None = None,
    data: Mapping[str, DataSet] | None = None,
    clock: Clock = time.perf_counter,
) -> list[CellResult]:
    """Measures every cell of a plan; the baseline's cells come first within each setting.

    Args:
        plan: what to measure.
        on_progress: called before each repeat, and when all are done.
        folder: for ``journal.jsonl`` and ``cells.jsonl``. A run that was interrupted goes on where
            it stopped, whatever of the plan has changed since: repeats with the same key are taken
            from the journal. None keeps everything in memory.
        models: models in memory, by the names that the plan uses as target and drafts.
        data: data sets in memory, by the names that the plan uses as sources.
        clock: in seconds.

    Raises:
        OutriderError: models, data or settings that do not work. An error that a method raises
            while it runs is kept as its cells' ``error``, and the other cells go on.
        KeyboardInterrupt: Ctrl-C, once the results so far have been written.
    """
    with _threads(plan.threads):
        bench = Bench(plan, on_progress, folder, models or {}, data or {}, clock)
        try:
            bench.measure()
            bench.compute_metrics()
        finally:  # also of what there is after Ctrl-C
            results = bench.results()
            write_cells(folder, results)
        return results


class Bench:
    """A plan while it runs; arguments as those of :func:`run_bench`."""

    def __init__(
        self,
        plan: BenchPlan,
        on_progress: OnProgress | None,
        folder: Path | None,
        models: Mapping[str, Given],
        data: Mapping[str, DataSet],
        clock: Clock,
    ) -> None:
        self.plan = plan
        self._clock = clock
        self._timeline = Timeline(on_progress)
        self._metrics = [METRICS.find(name) for name in plan.metrics]
        for entry in self._metrics:
            entry.check()
        self._meters = {name: METERS.find(name).open() for name in plan.meters}
        sources = [_read(spec, data) for spec in plan.data]
        self.journal = Journal(None if folder is None else folder / JOURNAL)
        self.engines = Engines(plan, models, self._timeline.stage)
        self.data = _named(
            as_prompts(each, spec.prompts, self.engines.target)
            for each, spec in zip(sources, plan.data, strict=True)
        )
        for each in self.data.values():
            _check_examples(each, self._metrics)
        self.cells = list(self._cells())
        self._seconds_per_note = seconds_per_note(clock)
        self._session = uuid4().hex
        self._errors: dict[str, str] = {}
        self._warm: set[tuple[Any, ...]] = set()

    # --------------------------------------------------------------------------------- cells

    def _cells(self) -> Iterator[Planned]:
        plan = self.plan
        shared = shared_identity(plan, self.engines.target, self.engines.target_fingerprint)
        by_method = [
            (spec, draft, method_identity(spec, self.engines.fingerprint_of(draft)))
            for spec in plan.all_methods
            for draft in self.engines.drafts_of(spec)
        ]
        for data, data_spec in zip(self.data.values(), plan.data, strict=True):
            about = data_identity(data, data_spec)
            for temperature in plan.temperatures:
                for batch_size in plan.batch_sizes:
                    for spec, draft, weights in by_method:
                        for gamma in plan.gammas_of(spec):
                            cell = Cell(
                                str(spec),
                                spec.title,
                                gamma,
                                draft,
                                temperature,
                                data.name,
                                batch_size,
                                spec.lossless_at(temperature),
                                str(spec) == str(plan.baseline),
                                shared | weights | about,
                            )
                            yield Planned(cell, spec, data)

    def baseline_of(self, cell: Cell) -> Cell:
        """The cell that a cell's speed-up is relative to."""
        return next(
            each.cell
            for each in self.cells
            if each.cell.is_baseline and each.cell.setting == cell.setting
        )

    # --------------------------------------------------------------------------- measurement

    def measure(self) -> None:
        """Runs all repeats that are not in the journal."""
        self._check_prompts()
        self._timeline.plan(
            (each.cell.key, number) for number in range(self.plan.repeats) for each in self.cells
        )
        for number in range(self.plan.repeats):
            self._repeat(self.cells, number)
        for number in range(self.plan.repeats, self.plan.max_repeats):
            unsteady = self._unsteady()
            if not unsteady:
                break
            self._timeline.plan((each.cell.key, number) for each in unsteady)
            self._repeat(unsteady, number)
        self._timeline.stage("results")

    def _repeat(self, cells: Sequence[Planned], number: int) -> None:
        """Runs one repeat of these cells, in an order of its own."""
        order = list(cells)
        random.Random(f"{self.plan.seed}/{number}").shuffle(order)
        for planned in order:
            key = planned.cell.key
            if self.journal.has(key, number) or key in self._errors:
                self._timeline.skip((key, number))
                continue
            self._timeline.stage(f"{planned.cell}, repeat {number + 1}")
            began = self._clock()
            try:
                repeat = self._run(planned, number)
            except OutriderError as error:
                self._errors[key] = str(error)
            else:
                self.journal.add(repeat)
            self._timeline.end((key, number), self._clock() - began)

    def _run(self, planned: Planned, number: int) -> Repeat:
        cell, spec = planned.cell, planned.spec
        engine = self.engines.engine(spec, cell.draft, cell.gamma)
        self._warm_up(planned)
        if not self.plan.remember and isinstance(engine.drafter, RemembersOutputs):
            engine.drafter.forget_outputs()
        sampling = self.plan.sampling(cell.temperature, number)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        examples = planned.data.examples
        for meter in self._meters.values():
            meter.begin()
        with objects_set_aside():
            batches = tuple(run_examples(engine, examples, sampling, cell.batch_size, self._clock))
        readings = _read_meters(self._meters)
        return Repeat(cell.key, number, sampling.seed or 0, date, batches, readings, self._session)

    def _warm_up(self, planned: Planned) -> None:
        """Continues the first examples, once per engine, kind of sampling and batch size."""
        cell = planned.cell
        state = cell.method, cell.draft, cell.gamma, cell.batch_size, cell.temperature > 0
        if state in self._warm:
            return
        self._warm.add(state)
        engine = self.engines.engine(planned.spec, cell.draft, cell.gamma)
        examples = planned.data.examples[: self.plan.warmup * cell.batch_size]
        sampling = self.plan.sampling(cell.temperature)
        for _ in run_examples(engine, examples, sampling, cell.batch_size, self._clock):
            pass

    def _check_prompts(self) -> None:
        """Encodes the prompt of every example, so that none fails in the middle of a run."""
        engine = self.engines.plain
        for data in self.data.values():
            for example in data:
                try:
                    engine.encode(as_prompt(example))
                except PromptError as error:
                    raise PromptError(
                        f"data set {data.name}, example {example.id!r}: {error}"
                    ) from None

    def _unsteady(self) -> list[Planned]:
        """The cells whose speed-up is not steady, and their baselines."""
        wanted: set[str] = set()
        for planned in self.cells:
            found = self._speedup(planned.cell)
            if found is not None and not found["steady"]:
                wanted |= {planned.cell.key, self.baseline_of(planned.cell).key}
        return [planned for planned in self.cells if planned.cell.key in wanted]

    # ------------------------------------------------------------------------------- results

    def compute_metrics(self) -> None:
        """Computes the plan's metrics that are not in the journal."""
        for planned in self.cells if self._metrics else ():
            repeats = self.journal.repeats(planned.cell.key)
            if repeats:
                self._timeline.stage(f"metrics of {planned.cell}")
                outputs = Outputs(planned.data, repeats, self._measured(planned), self.engines)
                compute(self._metrics, outputs, self.journal)

    def _measured(self, planned: Planned) -> Callable[[], list[RequestRecord]]:
        """Makes the outputs of an additional run that measures divergences."""

        def outputs() -> list[RequestRecord]:
            cell = planned.cell
            engine = self.engines.engine(planned.spec, cell.draft, cell.gamma, measure=True)
            sampling = self.plan.sampling(cell.temperature)
            batches = run_examples(engine, planned.data.examples, sampling, cell.batch_size)
            return [request for batch in batches for request in batch.requests]

        return outputs

    def results(self) -> list[CellResult]:
        """The results of all cells with at least one repeat, and of those that failed."""
        about = environment(self.plan, self.engines.target)
        return [
            self._result(planned, about)
            for planned in self.cells
            if self.journal.repeats(planned.cell.key) or planned.cell.key in self._errors
        ]

    def _result(self, planned: Planned, about: Mapping[str, Any]) -> CellResult:
        cell, examples = planned.cell, planned.data.examples
        repeats = self.journal.repeats(cell.key)
        tokenizer = self.engines.target.tokenizer
        classes = None if tokenizer is None else TokenClasses(tokenizer)
        share = {"measuring_share": measuring_share(repeats, self._seconds_per_note)}
        return CellResult(
            cell,
            planned.data.as_dict(),
            repeats,
            speed_of(repeats, examples, classes) | share if repeats else {},
            self._speedup(cell),
            known(self._metrics, repeats, self.journal),
            samples_of(repeats[0], examples, tokenizer) if repeats else [],
            self._errors.get(cell.key, ""),
            about,
        )

    def _speedup(self, cell: Cell) -> dict[str, Any] | None:
        if cell.is_baseline:
            return None
        baseline = self.journal.repeats(self.baseline_of(cell).key)
        return speedup(self.journal.repeats(cell.key), baseline)


# --------------------------------------------------------------------------------------- parts


def _read(spec: DataSpec, given: Mapping[str, DataSet]) -> DataSet:
    data = given[spec.source] if spec.source in given else read_data(spec.source, spec.name)
    kept = chosen(data, spec.tasks, spec.limit)
    return with_forced_references(kept) if spec.forced else kept


def _named(sets: Iterator[DataSet]) -> dict[str, DataSet]:
    """The data sets by name.

    Raises:
        InvalidParameterError: two with the same name.
    """
    found: dict[str, DataSet] = {}
    for each in sets:
        if each.name in found:
            raise InvalidParameterError(
                f"data: two data sets are called {each.name!r}, {found[each.name].source} and "
                f"{each.source}: give one of them another name"
            )
        found[each.name] = each
    return found


def _check_examples(data: DataSet, metrics: Sequence[MetricEntry]) -> None:
    """Checks that every metric can be computed of every turn, before anything is measured."""
    for entry in metrics:
        for example in data:
            for turn in example.turns:
                if entry.needs_reference and turn.reference is None:
                    raise InvalidParameterError(
                        f"metric {entry.name!r} needs reference answers, and example "
                        f"{example.id!r} of data set {data.name} has none"
                        f"{' for each of its turns' if example.later else ''}: leave out the "
                        f"metric, or the data set's tasks without references"
                    )
                entry.check_example(turn)


def _read_meters(meters: Mapping[str, Meter]) -> dict[str, Mapping[str, Any]]:
    return {name: meter.end() for name, meter in meters.items()}


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
