"""Linear layers of many tokens, and prefill: which kernel is fastest on this kind of processor.

    python -m benchmarks.wide [--model runs/smollm2/model] [--tokens 1 4 16 32 128 512] \\
        [--prefill 512 4096] [--threads 1] [--megabytes 100] [--out DIR]

Times one linear layer per shape of the model, in billions of products per second: our kernels over
packed bfloat16 weights, with bfloat16 and with float32 inputs, and over weights of few bits, with
bfloat16 inputs; and torch's (oneDNN, MKL). So many megabytes of layers take turns, as in a model;
with 0, one layer stays in the processor's cache. Times the prefill of prompts, in tokens per
second. With one thread, times are those that the processor spent on this process, which other load
changes little; with more they are wall-clock times. Writes this processor's section of
``wide.json``, and ``wide.md``. The numbers of ``outrider/runtime/kernels/processors.py`` are read
from it.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks import page
from outrider import load_model
from outrider.runtime import HFModel
from outrider.runtime.executors.prepare import prepare
from outrider.runtime.kernels.build import load_kernels
from outrider.runtime.kernels.grouped import rounded
from outrider.runtime.kernels.packing import pack, pack_groups
from outrider.runtime.kernels.processors import processor
from outrider.runtime.prefill import unsampled_context

DTYPES = ("bfloat16", "float32")
GROUP = 32  # inputs with a scale of their own, in weights of few bits


def fastest(run: Callable[[], object], threads: int, seconds: float = 0.03) -> float:
    """Seconds of the fastest of three series of runs."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    run()
    best = float("inf")
    for _ in range(3):
        began, count = clock(), 0
        while not count or clock() - began < seconds:
            run()
            count += 1
        best = min(best, (clock() - began) / count)
    return best


def shapes(module: nn.Module) -> list[tuple[int, int]]:
    """Inputs and outputs of the module's linear layers, each once."""
    layers = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
    return sorted({(layer.in_features, layer.out_features) for layer in layers})


def packed(weight: Tensor) -> Tensor:
    """The weight in bfloat16, packed for the kernels."""
    result: Tensor = pack(weight, False)
    return result


def packed_in_few_bits(weight: Tensor, bits: int) -> Tensor:
    """The weight as Q8_0 or Q4_0 has it, packed for the kernels."""
    few = rounded(weight, bits, math.gcd(GROUP, weight.shape[1]), offsets=False)
    result: Tensor = pack_groups(few.values_NK, few.scale_NG, None, bits)
    return result


packed_in_8_bits = partial(packed_in_few_bits, bits=8)
packed_in_4_bits = partial(packed_in_few_bits, bits=4)


def layer_speeds(
    inputs: int, outputs: int, tokens: int, threads: int, megabytes: float
) -> dict[str, float]:
    """Billions of products per second of each kernel."""
    copies = max(1, round(megabytes * 1e6 / (2 * inputs * outputs)))
    weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(copies)]
    x = torch.randn(tokens, inputs)
    narrow, ours = x.bfloat16(), torch.ops.outrider.linear
    runs: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], object]]] = {
        "ours, bfloat16": (packed, lambda each: ours(narrow, each, None, outputs, 0)),
        "ours, float32": (packed, lambda each: ours(x, each, None, outputs, 0)),
        "ours, 8 bits": (packed_in_8_bits, lambda each: ours(narrow, each, None, outputs, 0)),
        "ours, 4 bits": (packed_in_4_bits, lambda each: ours(narrow, each, None, outputs, 0)),
        "torch, bfloat16": (Tensor.bfloat16, lambda each: linear(narrow, each)),
        "torch, float32": (Tensor.float, lambda each: linear(x, each)),
    }
    products = inputs * outputs * tokens * copies / 1e9
    speeds = {}
    for name, (prepared, run) in runs.items():
        ready = [prepared(weight) for weight in weights]
        seconds = fastest(partial(_all, run, ready), threads)
        speeds[name] = products / seconds
    return speeds


def _all(run: Callable[[Tensor], object], weights: Sequence[Tensor]) -> None:
    for weight in weights:
        run(weight)


def prefill_speed(model: HFModel, tokens: int, threads: int) -> float:
    """Tokens per second."""
    prompt = [37 * i % (model.num_tokens - 10) + 10 for i in range(tokens + 1)]
    return tokens / fastest(lambda: model.start(unsampled_context(model, prompt)), threads, 0)


@torch.inference_mode()
def measure(
    source: str, tokens: Sequence[int], prefill: Sequence[int], threads: int, megabytes: float
) -> Any:
    """This processor's section."""
    torch.set_num_threads(threads)
    load_kernels(few_bits=True)
    layers: list[dict[str, Any]] = []
    prefills: list[dict[str, Any]] = []
    for dtype in DTYPES:
        model = load_model(source, dtype=dtype, device="cpu")
        if dtype == DTYPES[0]:
            layers = [
                {"shape": shape, "tokens": n, "speeds": layer_speeds(*shape, n, threads, megabytes)}
                for shape in shapes(model.module)
                for n in tokens
            ]
        prepare(model, "auto", own=True)
        prefills += [
            {"dtype": dtype, "tokens": n, "speed": prefill_speed(model, n, threads)}
            for n in prefill
        ]
    clock = "processor time" if threads == 1 else "wall-clock time"
    about = page.about(
        f"python -m benchmarks.wide --model {source} --tokens {' '.join(map(str, tokens))} "
        f"--prefill {' '.join(map(str, prefill))} --threads {threads} --megabytes {megabytes:g}",
        model=Path(source).name,
        clock=clock,
        weights=f"{megabytes:g} MB of weights in turn" if megabytes else "weights in cache",
    )
    return {"about": about, "layers": layers, "prefill": prefills}


def markdown(sections: Mapping[str, Any]) -> str:
    """One section per kind of processor."""
    lines = ["# Wide forward passes"]
    for name, section in sections.items():
        about = section["about"]
        text = (
            f"{about['clock']}, shapes of `{about['model']}`, {about['weights']}; billions of "
            "products per second."
        )
        lines += ["", *page.header(name, about, text, level=2)]
        columns = list(section["layers"][0]["speeds"]) if section["layers"] else []
        lines += page.table(
            ("inputs × outputs", "tokens", *columns),
            (
                (
                    f"{row['shape'][0]} × {row['shape'][1]}",
                    row["tokens"],
                    *(f"{speed:.0f}" for speed in row["speeds"].values()),
                )
                for row in section["layers"]
            ),
        )
        lines += page.table(
            ("dtype", "prefill, tokens", "tokens/s"),
            ((row["dtype"], row["tokens"], f"{row['speed']:.0f}") for row in section["prefill"]),
        )
    return "\n".join(lines) + "\n"


def written(out: Path, name: str, section: Any) -> str:
    """Adds a section to the report file, writes the page, and returns it."""
    file = out / "wide.json"
    sections = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    sections[name] = section
    text = markdown(sections)
    page.write(out, "wide", sections, text)
    return text


def main() -> None:
    """Parses the options, measures, and writes the page."""
    options = page.parser(__doc__, threads=1)
    options.add_argument("--model", default="runs/smollm2/model")
    options.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 32, 128, 512])
    options.add_argument("--prefill", type=int, nargs="+", default=[512, 4096])
    options.add_argument(
        "--megabytes", type=float, default=100, help="of bfloat16 weights; 0: one layer"
    )
    asked = options.parse_args()
    section = measure(asked.model, asked.tokens, asked.prefill, asked.threads, asked.megabytes)
    print(written(asked.out, processor().name, section))


if __name__ == "__main__":
    main()
