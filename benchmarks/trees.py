"""Trees against chains: tokens per round, the cost of the target's pass, and other costs.

    python -m benchmarks.trees [--texts 24] [--tokens 96] [--repeats 15] [--out DIR]

On the embedded pair. First, counts how often the child of each rank is accepted, for children drawn
independently and without replacement, and plans the best tree of each kind with 16 nodes (Sequoia's
dynamic program). Then every configuration continues the same prompts in batches of 16, which gives
tokens per round with the standard error over outputs. All drafts except the K-SEQ rows and their
chain have the same number of nodes. Single sequences give the share of a round outside both
models' passes. Finally, the target's pass alone is timed over a tree of 16 nodes and a chain of 6,
interleaved. Writes JSON and a Markdown table.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import outrider
from benchmarks import page
from benchmarks.vs_transformers import PROMPTS
from outrider import Sampling
from outrider.core import Context, Draft
from outrider.drafters.tree.topology import Topology
from outrider.engine import Engine
from outrider.lab.analysis.tree_plan import best_tree
from outrider.lab.tree_plan import count_ranks
from outrider.methods import find_method
from outrider.runtime import HFModel
from outrider.sampling import Warp

NODES = 16
SEQUENCES = 4
DEPTH = 8
PASS_BAR, SHARE_BAR = 1.25, 0.15
SAME_WHEN_GREEDY = ("block", "specinfer", "traversal", "top-k-tree", "best-of-k")
_RANKS = 12


@dataclass(frozen=True)
class Configuration:
    """A method with its options, and its name in the table."""

    name: str
    method: str
    gamma: int | None = None
    options: dict[str, object] = field(default_factory=dict)


def k_ary(width: int, num_nodes: int) -> Topology:
    """The first nodes, breadth first, of the infinite tree with ``width`` children per node."""
    paths: list[tuple[int, ...]] = [()]
    parent = 0
    while len(paths) <= num_nodes:
        paths += [(*paths[parent], rank) for rank in range(width)]
        parent += 1
    return Topology.rank_paths(paths[1 : num_nodes + 1])


def planned(acceptance: Sequence[float], num_nodes: int) -> Topology:
    """The tree with the most expected tokens for a number of drafted nodes."""
    return Topology.rank_paths(best_tree(acceptance, num_nodes + 1, DEPTH).paths)


def configurations(independent: Topology, distinct: Topology) -> list[Configuration]:
    """All compared configurations; chains first."""
    widths = [k for k in (2, 3, 4, 8, NODES) if k <= NODES]
    length = NODES // SEQUENCES
    return [
        Configuration(f"chain of {NODES}", "speculative", NODES),
        Configuration(f"chain of {NODES}, block", "block", NODES),
        Configuration("planned tree, i.i.d.", "specinfer", None, {"topology": independent}),
        Configuration("planned tree, without replacement", "sequoia", None, {"topology": distinct}),
        Configuration("planned tree, traversal", "traversal", None, {"topology": distinct}),
        Configuration("planned tree, best tokens", "top-k-tree", None, {"topology": distinct}),
        Configuration("dynamic tree", "dynamic-tree", None, {"num_nodes": NODES + 1, "width": 6}),
        *(
            Configuration(f"{k}-ary tree", "sequoia", None, {"topology": k_ary(k, NODES)})
            for k in widths
        ),
        Configuration(f"chain of {length}", "speculative", length),
        Configuration(f"K-SEQ, {SEQUENCES} chains of {length}", "spectr", length),
        Configuration(f"best of {SEQUENCES} chains of {length} (biased)", "best-of-k", length),
    ]


def measure(
    pair: tuple[HFModel, HFModel], each: Configuration, sampling: Sampling, texts: int
) -> dict[str, Any]:
    """Tokens per round in batches, and where the time of rounds of single sequences goes."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(texts)]
    results = _engine(pair, each, 16).generate(prompts, sampling)
    lengths = [result.stats.acceptance_length for result in results]
    single = _engine(pair, each, 1)
    single.generate(PROMPTS[0], replace(sampling, max_new_tokens=8))  # warm-up
    alone = single.generate(PROMPTS[:4], sampling).stats
    rounds = alone.rounds
    return {
        "name": each.name,
        "method": each.method,
        "nodes": alone.drafted / rounds,
        "tokens_per_round": results.stats.acceptance_length,
        "error": statistics.stdev(lengths) / len(lengths) ** 0.5,
        "other_share": alone.other_seconds / alone.seconds,
        "milliseconds": {
            "draft": 1e3 * alone.draft_seconds / rounds,
            "target": 1e3 * alone.target_seconds / rounds,
            "other": 1e3 * alone.other_seconds / rounds,
        },
        "tokens_per_second": alone.tokens_per_second,
    }


def _engine(pair: tuple[HFModel, HFModel], each: Configuration, batch: int) -> Engine:
    return Engine(
        *pair,
        find_method(each.method),
        num_speculative_tokens=each.gamma,
        max_batch_size=batch,
        options=each.options,
        measure=False,
    )


def acceptance(
    pair: tuple[HFModel, HFModel], children: Any, sampling: Sampling, rounds: int
) -> list[float]:
    """Share of positions at which the child of each rank is accepted."""
    target, draft = pair
    assert target.tokenizer is not None
    prompts = [target.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    with torch.inference_mode():
        counts = count_ranks(target, draft, prompts, sampling, _RANKS, rounds, children=children)
    return [count / sum(counts) for count in counts[:-1]]


def pass_times(target: HFModel, repeats: int) -> dict[str, float]:
    """Seconds of a pass over a tree of 16 nodes and over a chain of 6 tokens, root included."""
    assert target.tokenizer is not None
    prompt = (target.tokenizer(PROMPTS[1])["input_ids"] * 8)[:200]
    context = Context.start(
        [prompt], Warp([Sampling()], target.num_tokens, target.device), [0], [0], target.device
    )
    with torch.inference_mode():
        cache = target.start(context)
        runs: dict[str, Callable[[], object]] = {}
        for name, topology in (("tree", k_ary(3, NODES - 1)), ("chain", Topology.chain(5))):
            runs[name] = partial(target.score, cache, _draft(context, topology))
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(-3, repeats):  # three of warm-up
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                if repeat >= 0:
                    seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _draft(context: Context, topology: Topology) -> Draft:
    parents_BN = torch.tensor([topology.parents])
    tokens_BN = context.root_B[:, None].expand_as(parents_BN)
    mask_BN = torch.ones_like(parents_BN, dtype=torch.bool)
    if topology.is_chain:
        return Draft.chain(tokens_BN, mask_BN, None, "chosen")
    return Draft(tokens_BN, parents_BN, mask_BN, None, "chosen")


def bars(report: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Each bar at temperature 1 with the measured value, and whether it is met."""
    rows = {row["name"]: row for row in report["temperatures"]["1.0"]["rows"]}

    def length(name: str) -> float:
        return float(rows[name]["tokens_per_round"])

    def compare(more: str, less: str) -> tuple[str, str, bool]:
        both = f"{length(more):.2f} and {length(less):.2f}"
        return f"{more} emits at least as many tokens as {less}", both, length(more) >= length(less)

    tree, independent = "planned tree, without replacement", "planned tree, i.i.d."
    k_ary_trees = [name for name in rows if name.endswith("-ary tree")]
    short = NODES // SEQUENCES
    found = [
        compare(tree, independent),
        compare(independent, f"chain of {NODES}"),
        compare(independent, f"chain of {NODES}, block"),
        compare("planned tree, traversal", f"chain of {NODES}, block"),
        compare(f"K-SEQ, {SEQUENCES} chains of {short}", f"chain of {short}"),
        compare(tree, max(k_ary_trees, key=length)),
    ]
    for dtype, times in report["passes"].items():
        ratio = times["tree"] / times["chain"]
        text = f"{dtype}: a pass over {NODES} nodes takes at most {PASS_BAR}× one over 6"
        found.append((text, f"{ratio:.2f}", ratio <= PASS_BAR))
    share = rows[tree]["other_share"]
    text = f"{tree}: at most {SHARE_BAR:.0%} of a round outside the passes"
    return [*found, (text, f"{share:.1%}", share <= SHARE_BAR)]


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    settings = (
        f"embedded pair in {about['dtype']}, {about['texts']} outputs of {about['tokens']} tokens. "
        "Tokens per round, the target's own included, ± standard error over outputs; milliseconds "
        "per round of single sequences."
    )
    lines = page.header("Trees against chains", about, settings)
    heads = "draft|nodes|tokens per round|draft ms|target ms|other ms|other share".split("|")
    for temperature, part in report["temperatures"].items():
        ranks = {kind: " ".join(f"{a:.3f}" for a in shares[:5]) for kind, shares in part["ranks"]}
        lines += [
            "",
            f"## Temperature {temperature}",
            "",
            "Share of positions at which the child of rank 1, 2, … is accepted: "
            + "; ".join(f"{kind} {shares}" for kind, shares in ranks.items()),
            *page.table(heads, map(_row, part["rows"])),
        ]
    passes = [
        (dtype, f"{1e3 * times['tree']:.1f}", f"{1e3 * times['chain']:.1f}")
        for dtype, times in report["passes"].items()
    ]
    lines += ["", "## The target's pass"]
    lines += page.table(("dtype", "16 nodes, ms", "chain of 6, ms"), passes)
    lines += page.bars_table(bars(report))
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    ms = [f"{row['milliseconds'][name]:.1f}" for name in ("draft", "target", "other")]
    tokens = f"{row['tokens_per_round']:.2f} ± {row['error']:.2f}"
    return row["name"], f"{row['nodes']:.1f}", tokens, *ms, f"{row['other_share']:.1%}"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything."""
    engine = outrider.load()
    assert engine.draft is not None
    pair = engine.target, engine.draft
    temperatures: dict[str, Any] = {}
    for temperature in (1.0, 0.0):
        sampling = Sampling(temperature=temperature, max_new_tokens=options.tokens, ignore_eos=True)
        ranks = [
            (kind, acceptance(pair, kind, sampling, options.rounds)) for kind in ("iid", "distinct")
        ]
        trees = [planned(shares, NODES) for _, shares in ranks]
        rows = []
        for each in configurations(*trees):
            if sampling.greedy and each.method in SAME_WHEN_GREEDY:
                continue
            print(f"temperature {temperature:g}: {each.name}", flush=True)
            rows.append(measure(pair, each, sampling, options.texts))
        temperatures[str(temperature)] = {"ranks": ranks, "rows": rows}
    return {
        "about": page.about(
            f"python -m benchmarks.trees --texts {options.texts} --tokens {options.tokens} "
            f"--repeats {options.repeats}",
            dtype=str(engine.target.dtype).removeprefix("torch."),
            texts=options.texts,
            tokens=options.tokens,
        ),
        "temperatures": temperatures,
        "passes": {
            dtype: pass_times(outrider.load(method="plain", dtype=dtype).target, options.repeats)
            for dtype in ("float32", "bfloat16")
        },
    }


def main() -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = page.parser(__doc__)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = run(options)
    page.publish(options.out, "trees", report, markdown(report))


if __name__ == "__main__":
    main()
