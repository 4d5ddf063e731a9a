"""Joint decoding on the embedded pair: tokens per round, perplexity under the target, speed.

    python -m benchmarks.joint [--quick] [--seeds 2] [--repeats 2] [--out DIR]

Every configuration continues the same prompts by the same number of tokens. *Accepted per round*
counts drafted tokens that were emitted; for MJGD and beam search, it only counts the tokens found
per round. *Perplexity* is exp of minus the mean log-probability under the target's raw distribution
(temperature 1, no truncation), averaged over the tokens of each output and then over outputs, as in
the paper. Since all outputs have the same length, that equals the mean over all tokens. Spreads are
standard deviations over the seeds.

Speed is measured on single prompts, in repeats that interleave the configurations. The ratio is to
speculative sampling in the same run, and its spread from the worst to the best repeat.

Argmax, low-temperature sampling and beam search in the same table show the effect of search alone.
The last table has MJGD by its block length K; K = 1 is greedy decoding. Since decoding without
randomness has no seeds to average over, it continues more prompts, the same ones extended by
sampled tokens. Writes JSON, a Markdown page and a figure.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

import outrider
from benchmarks.vs_transformers import PROMPTS as COMMON
from outrider import Engine, Result, Sampling, Stats
from outrider.lab.metadata import hardware
from outrider.runtime import HFModel

GAMMA, BLOCKS = 4, (1, 2, 3, 5)
PROMPTS = (
    *COMMON,
    "def read_lines(path):\n    ",
    "def merge_sort(items):\n    if len(items) <= 1:\n        ",
    "class Node:\n    def __init__(self, value",
    "import argparse\n\n\ndef main():\n",
    "@property\ndef name(self):\n    ",
    "def test_addition():\n    assert ",
    "with open(filename) as handle:\n    ",
    "while True:\n    line = sys.stdin.readline()\n    if ",
    "class Config(object):\n    DEBUG = False\n    ",
    "def parse_args(argv=None):\n    ",
    "for i in range(10):\n    ",
    "from setuptools import setup\n\nsetup(\n    name=",
    "logger = logging.getLogger(__name__)\n\n\ndef ",
    "def distance(x1, y1, x2, y2):\n    ",
    "if __name__ == '__main__':\n    ",
    "class Matrix:\n    def __mul__(self, other):\n        ",
)


@dataclass(frozen=True)
class Configuration:
    """A named method with its options and sampling parameters."""

    name: str
    method: str
    options: dict[str, object] = field(default_factory=dict)
    temperature: float = 1.0
    truncated: bool = True
    gamma: int | None = GAMMA

    def engine(self, target: HFModel, draft: HFModel) -> Engine:
        return outrider.load(target, draft, self.method, self.gamma, options=self.options)

    def sampling(self, tokens: int, seed: int) -> Sampling:
        """The paper's warp: top-k 20, then top-p 0.9."""
        top_k, top_p = (20, 0.9) if self.truncated else (0, 1.0)
        return Sampling(
            temperature=self.temperature,
            top_k=top_k,
            top_p=top_p,
            max_new_tokens=tokens,
            seed=seed,
            ignore_eos=True,
            logprobs=0,
        )


SAMPLING, SPECULATIVE, MJSD = "sampling", "speculative", "MJSD, 8 beams, τ 0.1"
WARPED = (
    Configuration(SAMPLING, "plain", gamma=None),
    Configuration(SPECULATIVE, "speculative"),
    Configuration("SpecTr (K-SEQ), 4 chains", "spectr", {"num_sequences": 4}),
    Configuration("best of 4 chains (biased)", "best-of-k", {"num_sequences": 4}),
    Configuration(MJSD, "mjsd", {"beams": 8, "tau": 0.1}),
    Configuration("MJSD, beams not sampled", "mjsd", {"beams": 8, "tau": 0.1, "search": "greedy"}),
    Configuration(
        "MJSD, raw distributions", "mjsd", {"beams": 8, "tau": 0.1, "distributions": "raw"}
    ),
    Configuration(
        "MJSD as the code runs it, τ 0.9",
        "mjsd",
        {"beams": 8, "tau": 0.9, "quantity": "step", "search": "copies"},
    ),
    Configuration("MTAD, 4 beams, τ 0.5", "mtad", {"beams": 4, "tau": 0.5}),
    Configuration("sampling, temperature 0.5", "plain", temperature=0.5, gamma=None),
    Configuration("argmax", "plain", temperature=0, gamma=None),
    Configuration("MJGD, K 5, 8 beams", "mjgd", {"beams": 8}, temperature=0),
    Configuration(
        "beam search, 8 beams", "beam-search", {"num_beams": 8}, temperature=0, gamma=None
    ),
)
UNTRUNCATED = tuple(
    Configuration(c.name, c.method, c.options, truncated=False, gamma=c.gamma)
    for c in WARPED
    if c.name in (SAMPLING, SPECULATIVE, MJSD)
)


def mjgd(K: int) -> Configuration:
    """MJGD with blocks of K tokens; K = 1 is greedy decoding."""
    if K == 1:
        return Configuration("K 1", "plain", temperature=0, gamma=None)
    return Configuration(f"K {K}", "mjgd", {"beams": 8}, temperature=0, gamma=K - 1)


def log_perplexity(results: Sequence[Result]) -> float:
    """Minus the mean log-probability over the tokens of each output, averaged over outputs."""
    return -statistics.fmean(statistics.fmean(result.logprobs) for result in results)


def quality(
    configuration: Configuration,
    engine: Engine,
    prompts: Sequence[str | list[int]],
    tokens: int,
    seeds: int,
) -> dict[str, Any]:
    """Tokens per round and perplexity, over all prompts and seeds."""
    seeds = seeds if configuration.temperature else 1
    runs = [engine.generate(prompts, configuration.sampling(tokens, seed)) for seed in range(seeds)]
    stats = Stats.total(run.stats for run in runs)
    logs = [log_perplexity(run) for run in runs]
    each = [math.exp(log) for log in logs]
    return {
        "accepted_per_round": stats.accepted / stats.rounds,
        "tokens_per_round": stats.acceptance_length,
        "perplexity": math.exp(statistics.fmean(logs)),
        "perplexity_by_seed": each,
        "spread": statistics.stdev(each) if seeds > 1 else None,
    }


def continued(engine: Engine, prompts: Sequence[str]) -> list[list[int]]:
    """Each prompt three times, each extended by 24 sampled tokens."""
    sampling = [WARPED[0].sampling(24, seed) for seed in range(3)]
    results = [result for each in sampling for result in engine.generate(prompts, each)]
    return [[*result.prompt_ids, *result.token_ids] for result in results]


def speeds(
    configurations: Sequence[Configuration],
    engines: dict[str, Engine],
    prompts: Sequence[str],
    tokens: int,
    repeats: int,
) -> dict[str, dict[str, Any]]:
    """Tokens per second of single prompts; repeats interleave, in an order that rotates."""
    found: dict[str, list[float]] = {configuration.name: [] for configuration in configurations}
    for repeat in range(repeats):
        shift = repeat % len(configurations)
        for configuration in (*configurations[shift:], *configurations[:shift]):
            began = time.perf_counter()
            for prompt in prompts:
                engines[configuration.name].generate(prompt, configuration.sampling(tokens, repeat))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            found[configuration.name].append(len(prompts) * tokens / seconds)
    base, rows = found[SPECULATIVE], {}
    for name, each in found.items():
        ratios = [mine / other for mine, other in zip(each, base, strict=True)]
        rows[name] = {
            "tokens_per_second": statistics.median(each),
            "speed_ratio": statistics.median(ratios),
            "speed_ratio_spread": [min(ratios), max(ratios)],
        }
    return rows


def measure(
    target: HFModel,
    draft: HFModel,
    prompts: Sequence[str],
    tokens: int,
    seeds: int,
    repeats: int,
    timed: int = 2,
) -> dict[str, Any]:
    """Measures all tables of the report."""
    engines = {c.name: c.engine(target, draft) for c in WARPED}
    rows = {c.name: quality(c, engines[c.name], prompts, tokens, seeds) for c in WARPED}
    for name, row in speeds(WARPED, engines, prompts[:timed], tokens, repeats).items():
        rows[name] |= row
    whole = {c.name: quality(c, engines[c.name], prompts, tokens, seeds) for c in UNTRUNCATED}
    longer = continued(engines[SAMPLING], prompts)
    blocks = {K: quality(c := mjgd(K), c.engine(target, draft), longer, tokens, 1) for K in BLOCKS}
    return {"warped": rows, "untruncated": whole, "mjgd": {str(K): b for K, b in blocks.items()}}


def bars(report: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Each bar with the measured value, and whether it is met."""
    found = []
    for key, words in (("warped", "top-k 20, top-p 0.9"), ("untruncated", "no truncation")):
        rows = report[key]
        ratio = rows[MJSD]["accepted_per_round"] / rows[SPECULATIVE]["accepted_per_round"]
        mine, base = rows[MJSD]["perplexity"], rows[SAMPLING]["perplexity"]
        text = f"MJSD accepts at least 1.5× speculative's tokens per round ({words})"
        found.append((text, f"{ratio:.2f}×", ratio >= 1.5))
        text = f"MJSD's perplexity is below that of sampling ({words})"
        found.append((text, f"{mine:.2f} against {base:.2f}", mine < base))
    one, two, *_, last = (report["mjgd"][str(K)]["perplexity"] for K in BLOCKS)
    text = f"MJGD's perplexity falls from K 1 to 2, and on to {BLOCKS[-1]}"
    return [*found, (text, f"{one:.3f}, {two:.3f}, {last:.3f}", one > two > last)]


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    lines = [
        "# Joint decoding",
        "",
        f"{about['date']}, {about['hardware']}, {about['threads']} threads, {about['dtype']}, "
        f"torch {about['torch']}, embedded pair. {about['prompts']} prompts, {about['tokens']} new "
        f"tokens each, {about['seeds']} seeds, γ {GAMMA}; speeds: batch 1, {about['timed']} "
        f"prompts, {about['repeats']} interleaved repeats. {about['note']}".rstrip(),
        "",
        f"Command: `{about['command']}`",
        "",
        "## Temperature 1, top-k 20, top-p 0.9",
        "",
        "The paper's warp. Perplexity is the target's own, before temperature and truncation.",
        "",
        "| | accepted per round | tokens per round | perplexity | tokens/s | ÷ speculative |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in report["warped"].items():
        low, high = row["speed_ratio_spread"]
        lines.append(
            f"{_quality(name, row)} {row['tokens_per_second']:.0f} | "
            f"{row['speed_ratio']:.2f}× ({low:.2f}–{high:.2f}) |"
        )
    head = ["| | accepted per round | tokens per round | perplexity |", "|---|---:|---:|---:|"]
    lines += ["", "## Temperature 1, no truncation", "", *head]
    lines += [_quality(name, row) for name, row in report["untruncated"].items()]
    lines += ["", "## MJGD by block length", "", "![](joint.svg)", "", "| K | perplexity |"]
    lines += ["|---:|---:|"]
    lines += [f"| {K} | {row['perplexity']:.3f} |" for K, row in report["mjgd"].items()]
    lines += ["", "## Bars", "", "| bar | measured | met |", "|---|---:|---|"]
    lines += [
        f"| {text} | {found} | {'yes' if met else 'no'} |" for text, found, met in bars(report)
    ]
    return "\n".join(lines) + "\n"


def _quality(name: str, row: dict[str, Any]) -> str:
    spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
    return (
        f"| {name} | {row['accepted_per_round']:.2f} | {row['tokens_per_round']:.2f} | "
        f"{row['perplexity']:.2f}{spread} |"
    )


def main() -> None:
    """Parses the options, measures, writes the report and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--timed", type=int, default=2, help="number of prompts for speed")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--note", default="", help="added to the page, for example other load")
    parser.add_argument("--quick", action="store_true", help="few prompts, one seed, one repeat")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    quick = options.quick
    prompts = PROMPTS[:4] if quick else PROMPTS
    seeds, repeats = (2, 1) if quick else (options.seeds, options.repeats)
    transformers.logging.set_verbosity_error()
    engine = outrider.load()
    assert engine.draft is not None
    report: dict[str, Any] = {
        "about": {
            "date": date.today().isoformat(),
            "hardware": hardware(),
            "threads": torch.get_num_threads(),
            "dtype": str(engine.target.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "prompts": len(prompts),
            "tokens": options.max_new_tokens,
            "seeds": seeds,
            "repeats": repeats,
            "timed": options.timed,
            "note": options.note,
            "command": "python -m benchmarks.joint" + (" --quick" if quick else ""),
        },
        **measure(
            engine.target,
            engine.draft,
            prompts,
            options.max_new_tokens,
            seeds,
            repeats,
            options.timed,
        ),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "joint.json").write_text(json.dumps(report, indent=1) + "\n")
    page = markdown(report)
    (options.out / "joint.md").write_text(page)
    draw(report, options.out / "joint.svg")
    print(page)


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws MJGD's perplexity by block length."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from outrider.lab.plots import BLUE

    style: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "outrider",
        "svg.fonttype": "none",
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        blocks = report["mjgd"]
        xs, ys = [int(K) for K in blocks], [row["perplexity"] for row in blocks.values()]
        axes.plot(xs, ys, color=BLUE, marker="o", lw=2)
        axes.set_xticks(xs)
        axes.set_xlabel("tokens found together, K (1: greedy decoding)")
        axes.set_ylabel("perplexity under the target")
        axes.set_title("MJGD, 8 beams, embedded target", fontsize=13)
        axes.grid(alpha=0.25, lw=0.6)
        figure.savefig(path, metadata={"Date": None, "Creator": "benchmarks.joint"})


if __name__ == "__main__":
    main()
