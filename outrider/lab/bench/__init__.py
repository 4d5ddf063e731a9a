"""Benchmarks: methods × draft lengths × temperatures × data sets × batch sizes in one run.

method_spec, plan, plan_file   what to measure
cell, identity                 one point of the grid; everything that its measurements depend on
engines, measure               the models and engines; one run over a data set
journal, record, results       measurements on disk, as JSON lines
run                            all of it: interleaved, repeated, resumed
progress                       how far it is
ratio, speed, token_classes    speed-ups with intervals; latencies; acceptance
metric, outputs, samples       metrics and meters that others register; sample outputs
"""

from outrider.lab.bench.cell import Cell
from outrider.lab.bench.method_spec import MethodSpec
from outrider.lab.bench.metric import METERS, METRICS, Meter, Metric, meter, metric
from outrider.lab.bench.plan import BenchPlan, DataSpec, plan_of
from outrider.lab.bench.plan_file import read_plan
from outrider.lab.bench.progress import Progress
from outrider.lab.bench.ratio import speedup
from outrider.lab.bench.record import BatchRecord, CellResult, Repeat, RequestRecord
from outrider.lab.bench.results import as_line, read_cells, write_cells
from outrider.lab.bench.run import run_bench

__all__ = [
    "METERS",
    "METRICS",
    "BatchRecord",
    "BenchPlan",
    "Cell",
    "CellResult",
    "DataSpec",
    "Meter",
    "MethodSpec",
    "Metric",
    "Progress",
    "Repeat",
    "RequestRecord",
    "as_line",
    "meter",
    "metric",
    "plan_of",
    "read_cells",
    "read_plan",
    "run_bench",
    "speedup",
    "write_cells",
]
