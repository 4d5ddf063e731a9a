"""The outputs of a cell as metrics get them, and the metrics that are computed of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine import Result
from outrider.lab.bench.engines import Engines
from outrider.lab.bench.imported_source import imported_source
from outrider.lab.bench.journal import Journal
from outrider.lab.bench.measure import as_prompt
from outrider.lab.bench.metric import MetricEntry
from outrider.lab.bench.record import Repeat, RequestRecord
from outrider.lab.data import DataSet, Example


@dataclass(frozen=True)
class Outputs:
    """The outputs of a cell.

    Attributes:
        data: the data set.
        repeats: the timed repeats, at least one.
        measured: makes the outputs of an additional run that measures divergences.
        engines: encode the prompts.
    """

    data: DataSet
    repeats: Sequence[Repeat]
    measured: Callable[[], list[RequestRecord]]
    engines: Engines

    def of(self, entry: MetricEntry) -> tuple[list[Example], list[Result]]:
        """The outputs that a metric gets: the example of each at its turn, and the result."""
        if entry.needs_divergence:
            return self._with_examples(self.measured())
        requests = [request for repeat in self.repeats for request in repeat.requests]
        return self._with_examples(requests)

    def _with_examples(
        self, requests: Sequence[RequestRecord]
    ) -> tuple[list[Example], list[Result]]:
        """The requests of an example follow each other in the order of their turns."""
        encode = self.engines.plain.encode
        current: dict[int, tuple[Example, str]] = {}
        examples, results = [], []
        for request in requests:
            example = self.data.examples[request.example]
            if request.turn:
                before, answer = current[request.example]
                example = before.after(answer)
            current[request.example] = example, request.text
            examples.append(example)
            results.append(request.result(example, encode(as_prompt(example))))
        return examples, results


def compute(entries: Sequence[MetricEntry], outputs: Outputs, journal: Journal) -> None:
    """Computes the metrics that are not in the journal, and adds them."""
    key = outputs.repeats[0].key
    for entry in entries:
        depends = _depends(entry, outputs.repeats)
        if journal.metric(key, depends) is None:
            values = entry.compute(*outputs.of(entry), outputs.engines.target)
            journal.add_metric(key, depends, values)


def known(
    entries: Sequence[MetricEntry], repeats: Sequence[Repeat], journal: Journal
) -> dict[str, Mapping[str, Any]]:
    """The metrics of a cell that are in the journal, by name."""
    found = {}
    for entry in entries if repeats else ():
        values = journal.metric(repeats[0].key, _depends(entry, repeats))
        if values is not None:
            found[entry.name] = values
    return found


def _depends(entry: MetricEntry, repeats: Sequence[Repeat]) -> str:
    """Names a metric, the code that computes it, and the outputs."""
    compute: Any = inspect.unwrap(entry.compute)
    function = compute if inspect.isfunction(compute) else type(compute)
    file = inspect.getsourcefile(function)
    source = "" if file is None else imported_source(function.__module__, Path(file))
    return f"{entry.name}/{source}/{len(repeats)}"
