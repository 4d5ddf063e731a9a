"""The saving of early exit: the target's pass over its own draft, with and without reuse.

    python -m benchmarks.early_exit [--repeats 30] [--out DIR]

The target of the embedded pair drafts with half of its layers. Each repeat drafts γ tokens, then
runs the remaining layers over them and their root, as the method does, and then the whole model
over the same draft, as a target without reuse would. Contexts have 256 tokens of source code. Times
are medians. Ratios are medians over repeats; the passes of a repeat follow each other, so other
load on the machine affects ratios less than times.

The draft takes γ + 1 passes of the first layers, the last of them without the head. It computes the
first layers for the last drafted token too, which a separate draft model would not process. The
saving is what the draft has computed already: (γ + 1) k of the (γ + 1) L layer-tokens of a whole
pass. If a pass over γ + 1 tokens costs hardly more than one over a single token, the saving is
worth one pass of k layers; if the time is proportional to the tokens, γ + 1 such passes.

This target was not trained for early exit, so few of its drafts are accepted. Acceptance is
measured by decoding, for completeness.

Writes JSON and a Markdown table. Legend: B rows, L layers.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import page
from outrider import Engine, Sampling, assets
from outrider.core import Budget, Context
from outrider.drafters.chain.early_exit import EarlyExitDrafter
from outrider.methods import METHODS
from outrider.runtime import HFModel, load_model
from outrider.runtime.hf.early_exit import EarlyExit
from outrider.sampling import Warp

CONTEXT = 256


@torch.inference_mode()
def measure(
    target: EarlyExit, prompts: list[list[int]], gamma: int, repeats: int
) -> dict[str, Any]:
    """Times for one batch size and γ, in seconds."""
    B = len(prompts)
    drafter = EarlyExitDrafter(target)
    distribution = Warp([Sampling()] * B, target.num_tokens, target.device)
    context = Context.start(prompts, distribution, [0] * B, range(B), target.device)
    cache, state = target.start(context), drafter.start(context)
    seconds: dict[str, list[float]] = {"draft": [], "remaining": [], "whole": []}
    for repeat in range(-3, repeats):  # three of warm-up
        rng = context.rng.at(torch.full_like(context.length_B, repeat + 3))
        began = time.perf_counter()
        draft = drafter.propose(state, context, Budget(gamma), rng)
        drafted = time.perf_counter()
        target.score(cache, draft)  # reuses the draft's results, for this pass only
        remaining = time.perf_counter()
        target.score(cache, draft)
        whole = time.perf_counter()
        passes = {
            "draft": drafted - began,
            "remaining": remaining - drafted,
            "whole": whole - remaining,
        }
        if repeat >= 0:
            for name, value in passes.items():
                seconds[name].append(value)
    k = target.k
    return {
        "B": B,
        "gamma": gamma,
        "layers": target.num_layers,
        "exit": k,
        "seconds": {name: _summary(times) for name, times in seconds.items()},
        "ratio": statistics.median(
            r / w for r, w in zip(seconds["remaining"], seconds["whole"], strict=True)
        ),
        "layer_ratio": 1 - k / target.num_layers,
    }


def _summary(times: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return {"median": quartiles[1], "lower_quartile": quartiles[0], "upper_quartile": quartiles[2]}


def acceptance(target: HFModel, prompts: list[list[int]], temperature: float) -> dict[str, float]:
    """Acceptance in decoding at γ = 5."""
    engine = Engine(target, None, METHODS["early-exit"])
    sampling = Sampling(temperature=temperature, max_new_tokens=48, ignore_eos=True)
    stats = engine.generate(prompts, sampling).stats
    return {
        "temperature": temperature,
        "alpha": stats.alpha or 0.0,
        "acceptance_length": stats.acceptance_length,
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    settings = (
        f"{about['dtype']}, medians of {about['repeats']} repeats, contexts of {CONTEXT} tokens. "
        f"The embedded target, exit at half of its layers. {about['note']}"
    )
    lines = page.header("Early exit: the target's pass", about, settings.rstrip())
    heads = "B|γ|layers|whole pass, ms|remaining layers, ms|ratio|draft, ms".split("|")
    lines += page.table(heads, map(_row, report["sizes"]), left=0)
    share = report["sizes"][0]["layer_ratio"]
    lines += [
        "",
        f"The remaining layers are {share:.2f} of all; embedding, masks, norm and head are part of "
        f"both passes. A draft takes γ + 1 passes of the first layers over one token, and the "
        f"target's pass reuses their keys, values and hidden states.",
    ]
    rows = [
        (f"{each['temperature']:g}", f"{each['alpha']:.2f}", f"{each['acceptance_length']:.2f}")
        for each in report["acceptance"]
    ]
    lines += page.table(("temperature", "α", "acceptance length, γ = 5"), rows, left=0)
    lines += ["", "The target was not trained for early exit, so few of its drafts are accepted."]
    return "\n".join(lines) + "\n"


def _row(size: dict[str, Any]) -> tuple[str, ...]:
    ms = {name: 1e3 * values["median"] for name, values in size["seconds"].items()}
    return (
        str(size["B"]),
        str(size["gamma"]),
        f"{size['exit']} + {size['layers'] - size['exit']}",
        f"{ms['whole']:.2f}",
        f"{ms['remaining']:.2f}",
        f"{size['ratio']:.2f}×",
        f"{ms['draft']:.2f}",
    )


def code_prompts(target: HFModel, num: int) -> list[list[int]]:
    """Contexts of ``CONTEXT`` tokens from this project's own source."""
    assert target.tokenizer is not None
    paths = sorted(Path(__file__).parent.parent.glob("outrider/core/*.py"))
    ids = target.tokenizer("".join(path.read_text() for path in paths))["input_ids"]
    step = (len(ids) - CONTEXT) // max(num, 1)
    return [ids[i * step : i * step + CONTEXT] for i in range(num)]


def main() -> None:
    """Parses the options, measures, writes the report and prints the table."""
    parser = page.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 3, 5, 8])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--note", default="", help="added to the page, for example other load")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    whole = load_model(assets.target_path(), dtype=options.dtype, role="target")
    target = EarlyExit(whole, whole.num_layers // 2)
    sizes = [
        measure(target, code_prompts(whole, B), gamma, options.repeats)
        for B in options.batches
        for gamma in options.gammas
    ]
    report = {
        "about": page.about(
            f"python -m benchmarks.early_exit --repeats {options.repeats} "
            f"--threads {options.threads} --gammas {' '.join(map(str, options.gammas))} "
            f"--batches {' '.join(map(str, options.batches))}",
            dtype=str(whole.dtype).removeprefix("torch."),
            repeats=options.repeats,
            note=options.note,
        ),
        "sizes": sizes,
        "acceptance": [acceptance(whole, code_prompts(whole, 4), t) for t in (0.0, 1.0)],
    }
    page.publish(options.out, "early_exit", report, markdown(report))


if __name__ == "__main__":
    main()
