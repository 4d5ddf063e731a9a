"""Models of 7 and 13 billion parameters on a GPU: speed, floors, gaps and waits.

    python -m benchmarks.gpu [--shapes 7b 13b smollm2] [--batches 1 4 16 64] [--gammas 4 8]
    python -m benchmarks.gpu --shapes 7b --quantize int4:32       # target and drafts in few bits
    python -m benchmarks.gpu --device cpu --shapes tiny           # a rehearsal, in seconds

Targets and drafts have the shapes of published models, not their weights (``gpu_shapes.py``), but
for the embedded pair. Acceptance is either set, with one probability for every token, with and
without the passes of a draft model (``gpu_rounds.py``); or real, that of the embedded pair, whose
function the inflated models (``--shapes inflated``) compute, too. The method ``synthetic`` is
measured beside the latter. In the last compile mode, ``generate`` of transformers runs beside them,
eagerly, by the module's own code, on the same weights, unless these are in few bits.

For each batch size, plain decoding and all configurations alternate. Timed are rounds of a full
batch after prefill and a few rounds of warm-up, by the wall clock, each until the device has
finished. Then follow a few rounds with synchronisation around each pass, a few under the profiler,
and a few in CUDA's debug mode. The floor of a pass is the bytes of its weights, keys and values
over the measured bandwidth; at large batches, arithmetic takes longer. Failures are reported, and
the other measurements continue.
"""

import argparse
import copy
import gc
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import outrider
from benchmarks import page
from benchmarks.gpu_configurations import (
    FAILURES,
    Settings,
    configurations,
    first_line,
    generations,
    measure,
)
from benchmarks.gpu_page import markdown
from benchmarks.gpu_shapes import FOR_GPUS, SHAPES, Group
from outrider.core.errors import OutriderWarning
from outrider.lab.profile.bandwidth import LARGE, last_level_cache, read_bandwidth
from outrider.runtime import HFModel
from outrider.runtime.executors.compiled import Compile
from outrider.runtime.hf.load import resolve_dtype
from outrider.runtime.hf.quantize import KINDS, quantize

ON_GPU = Settings((1, 4, 16, 64), (4, 8), ("off", "auto"), 0.8, 16, 3)
REHEARSAL = Settings((1, 2), (2,), ("off",), 0.8, 2, 1)


def run(
    group: Group,
    settings: Settings,
    device: torch.device,
    bandwidth: float,
    notes: list[str],
    kind: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields all rows of a target, of weights of this kind; adds warnings to the notes."""
    dtype = resolve_dtype(None, device)
    print(f"{group.target.name}: building", flush=True)
    built = [member.build(device, dtype) for member in (group.target, *group.drafts)]
    own_code = [HFModel(_twin(each.module), each.tokenizer, each.name) for each in built]
    if kind is not None:
        built = [_quantized(each, kind) for each in built]
    for mode in settings.modes:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", OutriderWarning)
            target, *drafts = (_prepared(model, mode) for model in built)
            for batch in settings.batches:
                print(f"{group.target.name}, compile={mode}, batch {batch}", flush=True)
                where = {"target": target.name, "compile": mode, "batch": batch}
                given = target, drafts, group.trained, batch, settings
                theirs = own_code[0], own_code[1:], group.trained, batch, settings
                beside = mode == settings.modes[-1] and kind is None
                others = generations(*theirs) if beside else ()
                entries = [*configurations(*given), *others]
                for row in measure(entries, settings, bandwidth):
                    yield where | row
        messages = {str(w.message) for w in caught if issubclass(w.category, OutriderWarning)}
        notes += sorted(f"{target.name}, compile={mode}: {message}" for message in messages)


def _twin(module: PreTrainedModel) -> PreTrainedModel:
    """A copy with the same parameters, whose code nobody replaces."""
    shared = chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(each): each for each in shared})


def _quantized(model: HFModel, kind: str) -> HFModel:
    """The model with weights of few bits."""
    module = quantize(model.module, kind, model.name)
    return HFModel(module, model.tokenizer, f"{model.name}, {kind}")


def _prepared(model: HFModel, mode: Compile) -> HFModel:
    """The model in a compile mode, sharing its weights with the other modes."""
    own = HFModel(model.module, model.tokenizer, model.name)
    return outrider.load(own, method="plain", compile=mode).target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:n, or cpu for a rehearsal")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(FOR_GPUS))
    names = sorted({draft.name for groups in SHAPES.values() for g in groups for draft in g.drafts})
    parser.add_argument(
        "--drafts", nargs="+", choices=names, help="draft models of targets that have any of these"
    )
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--gammas", type=int, nargs="+")
    parser.add_argument(
        "--modes", nargs="+", choices=["off", "auto"], help="compile modes of the models"
    )
    parser.add_argument("--quantize", metavar="KIND", choices=KINDS, help="weights of few bits")
    parser.add_argument(
        "--acceptance", type=float, help="probability that a token is accepted, where it is set"
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path, help=f"folder; {page.RESULTS} on a GPU, else none")
    return parser


def _checked(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the options; without a GPU, only a rehearsal is allowed."""
    options = parser.parse_args(arguments)
    options.device = device = torch.device(options.device)
    remedy = "to see it run without a GPU: --device cpu --shapes tiny"
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(f"--device {device}: {torch.cuda.device_count()} CUDA devices here; {remedy}")
    if device.type != "cuda" and options.shapes != ["tiny"]:
        parser.error(f"--shapes {' '.join(options.shapes)}: these are for a GPU; {remedy}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, writes the report as it grows and prints the page."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _checked(_parser(), arguments)
    device, on_gpu = options.device, options.device.type == "cuda"
    given = {name: value for name in vars(ON_GPU) if (value := getattr(options, name)) is not None}
    settings = replace(ON_GPU if on_gpu else REHEARSAL, **given)
    out = options.out or (page.RESULTS if on_gpu else None)
    if "auto" in settings.modes:
        torch._dynamo.config.recompile_limit = 64  # dynamo counts the graphs of all models together
    transformers.logging.set_verbosity_error()
    num_bytes = max(LARGE, 8 * (last_level_cache(device) or 0)) if on_gpu else 2**24
    memory = read_bandwidth(device, num_bytes)
    report: dict[str, Any] = {
        "about": page.about(
            " ".join(["python -m benchmarks.gpu", *arguments]),
            device=str(device),
            cuda=torch.version.cuda,
            **vars(settings),
        ),
        "memory": memory.as_dict(),
        "rows": [],
        "notes": [],
    }
    for group in (group for name in options.shapes for group in SHAPES[name]):
        group = group.among(options.drafts)
        try:
            kind, notes = options.quantize, report["notes"]
            for row in run(group, settings, device, memory.median, notes, kind):
                report["rows"].append(row)
                _write(report, out)
        except FAILURES as error:
            report["notes"].append(f"{group.target.name}, aborted: {first_line(error)}")
        gc.collect()
        if on_gpu:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    _write(report, out)
    print(markdown(report))


def _write(report: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        page.write(out, "gpu", report, markdown(report))


if __name__ == "__main__":
    main()
