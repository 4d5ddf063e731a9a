"""β by batch size, and the batch at which speculation stops paying. Leviathan et al., ICML 2023,
section 3.4, assume β = 1.

https://arxiv.org/abs/2211.17192

β is the time of a target pass that verifies γ + 1 tokens of each row over one that decodes one.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from outrider.core import Context, Draft
from outrider.lab.analysis.speedup import speedup
from outrider.runtime import HFModel
from outrider.sampling import Sampling, Warp
from recipes.reproduce.effect import certain, mean, positive
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import alpha, values
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table

GAMMA = 4
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXT = 64
REPEATS = 15


@torch.inference_mode()
def times(lab: Lab) -> dict[str, dict[str, list[float]]]:
    """Seconds of passes over one and over γ + 1 tokens per row, by batch size; interleaved."""
    target = lab.model(lab.subject.target, "target")
    runs = {(B, N): _passes(target, B, N) for B in BATCHES for N in (1, GAMMA + 1)}
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


def measure(lab: Lab) -> Findings:
    """β at batch sizes 1 to 32, and the speed-up that follows with the measured α and c."""
    lab.require_times()
    found: dict[str, Any] = lab.kept("beta-batch", lambda: times(lab), batches=BATCHES)
    cells = lab.bench(lab.speculative(), gammas=[GAMMA], temperatures=[1.0])
    rate = mean(values(cells.one("speculative"), alpha))
    c = lab.cost()
    wide = str(GAMMA + 1)
    betas = {
        B: statistics.median(found[str(B)][wide]) / statistics.median(found[str(B)]["1"])
        for B in BATCHES
    }
    gains = {B: speedup(rate, GAMMA, c, beta) for B, beta in betas.items()}
    first, last = BATCHES[0], BATCHES[-1]
    pairs = [
        (many / one, few / single)
        for many, one, few, single in zip(
            found[str(last)][wide],
            found[str(last)]["1"],
            found[str(first)][wide],
            found[str(first)]["1"],
            strict=True,
        )
    ]
    stops = next((B for B in BATCHES if gains[B] <= 1), None)
    effects = [
        positive(
            f"β at batch {last} exceeds that at {first}",
            pairs,
            lambda drawn: (
                statistics.median(a for a, _ in drawn) - statistics.median(b for _, b in drawn)
            ),
            "difference {:.2f}",
        ),
        certain(
            "speculation stops paying at some batch size",
            f"batch {stops}" if stops else f"not up to {last}",
            stops is not None,
            expected="depends on the machine",
        ),
    ]
    rows = [[str(B), f"{betas[B]:.2f}", f"{gains[B]:.2f}×"] for B in BATCHES]
    return Findings(
        effects,
        [
            Table(
                f"γ {GAMMA}, α {rate:.2f}, c {c:.2f}",
                ["batch size", "β", "predicted speed-up"],
                rows,
            )
        ],
        [
            Figure("β by batch size", "batch size", "β", {"β": list(betas.items())}),
            Figure("Predicted speed-up", "batch size", "×", {"speed-up": list(gains.items())}),
        ],
    )


RECIPE = Recipe(
    "beta-batch",
    "β by batch size",
    "Leviathan et al., ICML 2023, section 3.4",
    "Verification is as fast as decoding one token while the machine has computing to spare; in "
    "large batches it has not, and speculation stops paying.",
    measure,
)
