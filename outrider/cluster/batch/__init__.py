"""Answers files of prompts with worker processes, or through Ray: ``outrider batch``.

    blocks.py       the lines of the input, in blocks
    lines.py        what a line asks for, and the line of output that answers it
    answer.py       a worker's models, and its answers to a block
    processes.py    worker processes on one machine, restarted when they die
    ray_data.py     the same through Ray Data
    parts.py        finished blocks on disk, from which an interrupted run goes on
    run.py          a whole file

A block's answers depend on its lines, the models and the options only, unless a governor chooses
draft lengths by the clock (``num_speculative_tokens="auto"``). A block that is answered again after
a worker died therefore has the same answers, whichever worker has it.
"""

from typing import TYPE_CHECKING

from outrider.imports.lazy import lazy

if TYPE_CHECKING:
    from outrider.cluster.batch.answer import LoadedModels
    from outrider.cluster.batch.lines import Asking
    from outrider.cluster.batch.processes import in_processes
    from outrider.cluster.batch.ray_data import through_ray
    from outrider.cluster.batch.run import Summary, run_batch

__all__ = ["Asking", "LoadedModels", "Summary", "in_processes", "run_batch", "through_ray"]

_HOME = {
    "Asking": "outrider.cluster.batch.lines",
    "LoadedModels": "outrider.cluster.batch.answer",
    "Summary": "outrider.cluster.batch.run",
    "in_processes": "outrider.cluster.batch.processes",
    "run_batch": "outrider.cluster.batch.run",
    "through_ray": "outrider.cluster.batch.ray_data",
}

__getattr__, __dir__ = lazy(__name__, _HOME)
