"""β by batch size, and the batch at which speculation stops paying. Leviathan et al., ICML 2023,
section 3.4, assume β = 1.

https://arxiv.org/abs/2211.17192

β is the time of a target pass that verifies γ + 1 tokens of each row over one that decodes one. A
run that measures no times computes it from the bytes and operations of the passes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from outrider.core import Context, Draft
from outrider.lab.analysis.speedup import speedup
from outrider.lab.energy.model import CPU
from outrider.lab.plan import Accelerator, RooflinePasses, model_size
from outrider.runtime import HFModel
from outrider.sampling import Sampling, Warp
from recipes.reproduce.effect import Effect, certain, mean, positive
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import alpha, values
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table

GAMMAS = (1, 2, 4, 8)
GAMMA = 4
"""Of the comparison of the smallest with the largest batch, and of the measured α."""
BATCHES = (1, 2, 4, 8, 16, 32)
PROCESSOR = Accelerator("processor", 64e9, CPU.bandwidth, CPU.rate, 1e9)
"""What times are computed for where none are measured: that of the estimates of energy."""
CONTEXT = 64
REPEATS = 15

Times = Mapping[int, Mapping[int, Sequence[float]]]
"""Seconds of passes by batch size and tokens per row."""


@torch.inference_mode()
def times(lab: Lab) -> dict[str, dict[str, list[float]]]:
    """Seconds of passes over one and over γ + 1 tokens per row, by batch size; interleaved."""
    target = lab.model(lab.subject.target, "target")
    runs = {(B, N): _passes(target, B, N) for B in BATCHES for N in (1, *(g + 1 for g in GAMMAS))}
    found: dict[str, dict[str, list[float]]] = {str(B): {} for B in BATCHES}
    for repeat in range(REPEATS + 2):
        for (B, N), run in runs.items():
            began = time.perf_counter()
            run()
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            if repeat >= 2:
                found[str(B)].setdefault(str(N), []).append(time.perf_counter() - began)
    return found


def _passes(target: HFModel, B: int, N: int) -> Any:
    """A forward pass of B rows with N query tokens each, after a context."""
    tokens = [(7 * i + 3) % target.num_tokens for i in range(CONTEXT)]
    warp = Warp([Sampling()] * B, target.num_tokens, target.device)
    context = Context.start([tokens] * B, warp, [0] * B, range(B), target.device)
    cache = target.start(context)
    drafted_BN = torch.tensor([tokens[:N]] * B, device=target.device)
    draft = Draft.chain(drafted_BN, torch.ones_like(drafted_BN, dtype=torch.bool), None, "chosen")
    return lambda: target.score(cache, draft)


def counted(lab: Lab) -> Times:
    """The same times, computed from the bytes and operations of each pass."""
    target: Any = lab.model(lab.subject.target, "target").module
    size = model_size(target.name_or_path, weight_bytes=4.0, kv_bytes=4.0)
    passes = RooflinePasses(size, PROCESSOR, 1, 1.0, 1.0, layer_seconds=0.0)
    return {
        B: {N: [passes.seconds(B, N, CONTEXT)] for N in (1, *(gamma + 1 for gamma in GAMMAS))}
        for B in BATCHES
    }


def measured(lab: Lab) -> Times:
    """The measured times, kept from an earlier run if there are any."""
    found = lab.kept("beta-batch", lambda: times(lab), batches=BATCHES, gammas=GAMMAS)
    return {int(B): {int(N): each for N, each in row.items()} for B, row in found.items()}


def measure(lab: Lab) -> Findings:
    """β by batch size and γ, and the speed-up that follows with the measured α and c."""
    cells = lab.bench(lab.speculative(), gammas=[GAMMA], temperatures=[1.0])
    rate = mean(values(cells.one("speculative"), alpha))
    found = measured(lab) if lab.size.timed else counted(lab)
    return evaluate(found, rate, lab.cost(), lab.size.timed)


def evaluate(found: Times, rate: float, c: float, timed: bool) -> Findings:
    """β and the best speed-up at each batch size.

    Args:
        found: times of passes.
        rate: α.
        c: time of a draft pass over that of a target pass of one token per row.
        timed: whether the times were measured.
    """
    betas = {
        gamma: {
            B: statistics.median(row[gamma + 1]) / statistics.median(row[1])
            for B, row in found.items()
        }
        for gamma in GAMMAS
    }
    gains = {
        B: {gamma: speedup(rate, gamma, c, betas[gamma][B]) for gamma in GAMMAS} for B in found
    }
    best = {B: max(GAMMAS, key=lambda gamma: each[gamma]) for B, each in gains.items()}
    stops = next((B for B in found if gains[B][best[B]] <= 1), None)
    first, last = min(found), max(found)
    effects = [
        _rises(found, first, last, timed),
        certain(
            "speculation stops paying at some batch size",
            f"batch {stops}" if stops else f"not up to {last}",
            stops is not None,
            expected="depends on the machine",
        ),
    ]
    rows = [
        [
            str(B),
            *(f"{betas[gamma][B]:.2f}" for gamma in GAMMAS),
            f"{gains[B][best[B]]:.2f}× at γ {best[B]}" if gains[B][best[B]] > 1 else "none",
        ]
        for B in found
    ]
    head = ["batch size", *(f"β, γ {gamma}" for gamma in GAMMAS), "best predicted speed-up"]
    lines = {f"γ {gamma}": list(betas[gamma].items()) for gamma in GAMMAS}
    notes = [
        f"c is taken as {c:.2f} at every batch size: the weights of the draft over the target's."
    ]
    if not timed:
        notes.append(
            "Times of passes were computed, not measured: the larger of the bytes in float32 over "
            f"{PROCESSOR.bandwidth / 1e9:g} GB/s and of the operations over "
            f"{PROCESSOR.flops / 1e9:g} GFLOP/s (outrider.lab.plan), without anything that a pass "
            "spends elsewhere."
        )
    return Findings(
        effects,
        [Table(f"α {rate:.2f}, c {c:.2f}", head, rows)],
        [
            Figure("β by batch size", "batch size", "β", lines),
            Figure(
                "Best predicted speed-up",
                "batch size",
                "×",
                {"speed-up": [(B, max(1.0, gains[B][best[B]])) for B in found]},
            ),
        ],
        notes,
    )


def _rises(found: Times, first: int, last: int, timed: bool) -> Effect:
    """The claim that β at γ 4 is larger at the largest batch than at the smallest."""
    claim, wide = f"β at batch {last} exceeds that at {first}", GAMMA + 1
    pairs = [
        (many / one, few / single)
        for many, one, few, single in zip(
            found[last][wide], found[last][1], found[first][wide], found[first][1], strict=True
        )
    ]
    if not timed:
        ((large, small),) = pairs
        return certain(claim, f"{large:.2f} and {small:.2f}", large > small)
    return positive(
        claim,
        pairs,
        lambda drawn: (
            statistics.median(a for a, _ in drawn) - statistics.median(b for _, b in drawn)
        ),
        "difference {:.2f}",
    )


RECIPE = Recipe(
    "beta-batch",
    "β by batch size",
    "Leviathan et al., ICML 2023, section 3.4",
    "Verification is as fast as decoding one token while the machine has computing to spare; in "
    "large batches it has not, and speculation stops paying.",
    measure,
)
