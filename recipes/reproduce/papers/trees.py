"""Chen, May, Svirschevski, Huang, Ryabinin, Jia and Chen, "Sequoia: Scalable and Robust Speculative
Decoding", NeurIPS 2024, and Cai et al., "Medusa", ICML 2024: token trees against chains.

https://arxiv.org/abs/2402.12374, https://arxiv.org/abs/2401.10774
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from outrider import Sampling
from outrider.drafters.tree.topology import FORMAT, VERSION, Topology
from outrider.lab.analysis.tree_plan import best_tree
from outrider.lab.tree_plan import count_ranks
from recipes.reproduce.effect import Effect, greater, mean
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import tokens_per_round, values
from recipes.reproduce.recipe import Findings, PaperModels, Recipe, Table

NODES, DEPTH = 16, 8
WIDTHS = (2, 4)
_RANKS = 12


def k_ary(width: int, num_nodes: int) -> Topology:
    """The first nodes, breadth first, of the infinite tree with ``width`` children per node."""
    paths: list[tuple[int, ...]] = [()]
    parent = 0
    while len(paths) <= num_nodes:
        paths += [(*paths[parent], rank) for rank in range(width)]
        parent += 1
    return Topology.rank_paths(paths[1 : num_nodes + 1])


def ranks(lab: Lab, temperature: float) -> list[float]:
    """Share of positions at which the child of each rank is accepted."""
    target = lab.model(lab.subject.target, "target")
    prompts = lab.prompt_ids("code")
    sampling = Sampling(temperature=temperature, seed=lab.seed)
    rounds = lab.choose(16, 64)
    with torch.inference_mode():
        draft = lab.model(lab.draft)
        counts = count_ranks(target, draft, prompts, sampling, _RANKS, rounds)
    return [count / sum(counts) for count in counts[:-1]]


def written(topology: Topology, file: Path) -> Path:
    """The file of a topology."""
    content = {"format": FORMAT, "version": VERSION, "paths": [list(p) for p in topology.paths]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def measure(lab: Lab) -> Findings:
    """The planned tree, k-ary trees and a chain of equally many nodes."""
    rows, effects = [], list[Effect]()
    shares = {}
    for T in lab.choose([1.0], [0.0, 1.0]):
        shares[T] = lab.kept(f"ranks-{T:g}", lambda T=T: ranks(lab, T), temperature=T)
        planned = Topology.rank_paths(best_tree(shares[T], NODES + 1, DEPTH).paths)
        trees = {"planned tree": planned} | {f"{k}-ary tree": k_ary(k, NODES) for k in WIDTHS}
        files = {
            name: written(tree, lab.folder / f"{name.replace(' ', '-')}-{T:g}.json")
            for name, tree in trees.items()
        }
        labels = {tree: name for name, tree in reversed(trees.items())}  # equal trees run once
        methods = [f"sequoia:topology={files[name]},label={name}" for name in labels.values()]
        shown = {"chain": "chain"} | {name: labels[tree] for name, tree in trees.items()}
        cells = lab.bench(
            f"speculative:gamma={NODES},label=chain", *methods, gammas=[None], temperatures=[T]
        )
        found = {name: values(cells.one(label), tokens_per_round) for name, label in shown.items()}
        for other in ("chain", *(f"{k}-ary tree" for k in WIDTHS)):
            effects.append(
                greater(
                    f"T = {T:g}: planned tree emits more per round than the {other}",
                    found["planned tree"],
                    found[other],
                    expected="where the draft's argmax is nearly always right, a "
                    "chain is the best plan"
                    if T == 0
                    else "few children after the first are accepted (see the "
                    "shares below), so that breadth may gain little",
                )
            )
        c = lab.cost()
        depths = {"chain": NODES} | {name: _depth(tree) for name, tree in trees.items()}
        plain = mean(lab.speed(cells.one("plain"), 0, 0))
        rows += [
            [
                f"{name}, T = {T:g}",
                str(depths[name]),
                f"{mean(each):.2f}",
                f"{mean(lab.speed(cells.one(shown[name]), c, depths[name])) / plain:.2f}×",
            ]
            for name, each in found.items()
        ]
    first = next(iter(shares.values()))
    return Findings(
        effects,
        [Table(f"{NODES} drafted nodes", ["", "levels", "tokens per round", "speed-up"], rows)],
        notes=[
            "Share of positions at which the child of rank 1, 2, … is accepted: "
            + " ".join(f"{share:.3f}" for share in first[:6])
            + ". The dynamic program of the Sequoia paper plans the tree from these shares. "
            "Medusa's 2.2× to 3.6× need its trained heads and are not measured here. Counted "
            "speeds take a level of a tree to cost one draft pass, and its verification one "
            "target pass.",
        ],
    )


def _depth(tree: Topology) -> int:
    return max(map(len, tree.paths))


RECIPE = Recipe(
    "trees",
    "Token trees against chains",
    "Medusa, ICML 2024; Sequoia, NeurIPS 2024",
    "Medusa 2.2× to 3.6×; the planned tree beats chains and k-ary trees of equal size.",
    measure,
    PaperModels("meta-llama/Llama-2-7b-hf", ("JackFram/llama-68m",)),
)
