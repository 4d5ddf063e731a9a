"""The time of a verdict: every verification rule for sampled chains against rejection sampling.

    python -m benchmarks.rules [--repeats 40] [--out DIR]

Distributions are synthetic: target logits are normal with standard deviation 3 (most of the mass on
a few per cent of the tokens, as in a language model), the draft's are the target's plus normal
noise with standard deviation 0.8, which gives an acceptance rate Σ min(p, q) of about 0.7 (the
measured one is reported). Candidates are drawn from the draft's distributions, so rejections occur
at their natural rate. Each repeat times one verdict of every rule on the same draft and the same
random numbers, in an order that rotates; drafts change from repeat to repeat. Times are means over
the repeats (between the 5th and the 95th percentile), since the cost of a lossy rule depends on the
draft; medians and quartiles are in the JSON. Ratios are to rejection sampling in the same run.

A pass is ``p - q`` over one distribution of the target and one of the draft per row, the least that
any rule reads where a chain stops. Writes JSON and a Markdown table.

Legend: B rows, N nodes (γ + 1), V vocabulary.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import outrider.verifiers
from benchmarks import page
from outrider.core import Draft, Stream, Verifier, row_keys

NUM_DRAFTS = 8
BARS = {"Block": 1.5, "Mentored": 3.0}  # times rejection
BAR_PASSES = 6.0  # rejection itself


def rules() -> dict[str, Verifier]:
    """Every rule, with default parameters, that verifies sampled chains by their distributions.

    Rejection sampling is the first.
    """
    found: dict[str, Verifier] = {}
    for name in ["Rejection", *sorted(outrider.verifiers.__all__)]:
        rule = getattr(outrider.verifiers, name)()
        if "iid" in rule.accepts and rule.needs == "distribution":
            found[name] = rule
    return found


def drafts(B: int, N: int, V: int, seed: int = 0) -> tuple[list[Draft], Tensor, float]:
    """Drafts from one set of distributions, the target's distributions, and the acceptance rate."""
    generator = torch.Generator().manual_seed(seed)
    z_BNV = 3 * torch.randn(B, N, V, generator=generator)
    noise_BNV = 0.8 * torch.randn(B, N, V, generator=generator)
    p_BNV, q_BNV = z_BNV.softmax(2), (z_BNV + noise_BNV).softmax(2)
    mask_BN = torch.ones(B, N, dtype=torch.bool)
    made = []
    for _ in range(NUM_DRAFTS):
        drawn_BN = torch.multinomial(q_BNV.flatten(0, 1), 1, generator=generator).view(B, N)
        made.append(Draft.chain(drawn_BN.roll(1, 1), mask_BN, q_BNV, "iid"))
    return made, p_BNV, float(torch.minimum(p_BNV, q_BNV).sum(2).mean())


def measure(B: int, gamma: int, V: int, repeats: int) -> dict[str, Any]:
    """All rules at one size: seconds per verdict, ratios to rejection, passes."""
    made, p_BNV, alpha = drafts(B, gamma + 1, V)
    key_B = row_keys([0] * B, list(range(B)), "cpu")
    verified = rules()

    def verdict(rule: Verifier, repeat: int) -> Callable[[], object]:
        rng = Stream(key_B, torch.full((B,), repeat))
        return lambda: rule(made[repeat % NUM_DRAFTS], p_BNV, rng)

    def one_pass() -> object:
        q_BNV = made[0].probs_BNV
        assert q_BNV is not None
        return p_BNV[:, 0] - q_BNV[:, 0]

    seconds: dict[str, list[float]] = {name: [] for name in ["pass", *verified]}
    for repeat in range(-3, repeats):  # three of warm-up
        names = list(seconds)
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            run = one_pass if name == "pass" else verdict(verified[name], repeat)
            began = time.perf_counter()
            run()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - began)
    rows = {name: _summary(times) for name, times in seconds.items()}
    base = rows["Rejection"]["mean"]
    return {
        "B": B,
        "gamma": gamma,
        "V": V,
        "alpha": alpha,
        "rows": rows,
        "ratios": {name: rows[name]["mean"] / base for name in verified},
        "passes": base / rows["pass"]["mean"],
    }


def _summary(times: list[float]) -> dict[str, Any]:
    ordered = sorted(times)
    cut = len(ordered) // 20
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else ordered * 3
    return {
        "mean": statistics.fmean(ordered[cut : len(ordered) - cut]),
        "median": quartiles[1],
        "lower_quartile": quartiles[0],
        "upper_quartile": quartiles[2],
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about, sizes = report["about"], report["sizes"]
    heads = [f"V={s['V']:,} B={s['B']} γ={s['gamma']}" for s in sizes]
    rate = statistics.fmean(s["alpha"] for s in sizes)
    settings = (
        f"float32, means of {about['repeats']} interleaved repeats. Synthetic distributions "
        f"(normal logits, standard deviation 3, noise 0.8) with an acceptance rate of {rate:.2f}."
    )
    rows = [
        ["Rejection, ms", *(_ms(s, "Rejection") for s in sizes)],
        ["one pass, ms", *(_ms(s, "pass") for s in sizes)],
        ["Rejection, passes", *(f"{s['passes']:.1f}" for s in sizes)],
    ]
    for name in sizes[0]["ratios"]:
        if name != "Rejection":
            rows.append([name, *(f"{s['ratios'][name]:.2f}×" for s in sizes)])
    found = [(text, f"{worst:.2f}", worst <= bar) for text, worst, bar in bars(sizes)]
    lines = page.header("The time of a verdict", about, settings)
    lines += page.table(["", *heads], rows) + page.bars_table(found, "worst")
    return "\n".join(lines) + "\n"


def bars(sizes: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Each bar with the worst measured value and the limit."""
    found = [
        (f"{name} at most {bar:g}× rejection", max(s["ratios"][name] for s in sizes), bar)
        for name, bar in BARS.items()
    ]
    passes = max(s["passes"] for s in sizes)
    return [*found, (f"Rejection at most {BAR_PASSES:g} passes", passes, BAR_PASSES)]


def _ms(size: dict[str, Any], name: str) -> str:
    return f"{1e3 * size['rows'][name]['mean']:.3f}"


def main() -> None:
    """Parses the options, measures, writes the report and prints the table."""
    parser = page.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_000])
    parser.add_argument("--gammas", type=int, nargs="+", default=[5, 16])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = [
        measure(B, gamma, V, options.repeats)
        for V in options.vocabularies
        for B in options.batches
        for gamma in options.gammas
    ]
    report = {
        "about": page.about(
            f"python -m benchmarks.rules --repeats {options.repeats}", repeats=options.repeats
        ),
        "sizes": sizes,
    }
    page.publish(options.out, "rules", report, markdown(report))


if __name__ == "__main__":
    main()
