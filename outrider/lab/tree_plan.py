"""Measures a pair of models and plans the token tree with the fewest seconds per token.

Two things are measured: how often the b-th best child of a node is the one that is accepted, in
rounds with a wide tree of one level; and the time of forward passes, of the target over 1 to
``num_nodes`` nodes, and of the draft model over one level. ``analysis.tree_plan`` plans the tree.

The plan leaves out the cost of verification, and what a tree costs beyond a chain with as many
nodes. Compare the planned tree with a chain before relying on it.

Legend: B rows, N nodes.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from outrider.core import Budget, Context, Draft, Verifier, commit_round, run_round, start_batch
from outrider.drafters.tree.static import TreeDrafter
from outrider.drafters.tree.topology import Topology
from outrider.lab.analysis.pass_times import interpolated
from outrider.lab.analysis.tree_plan import TreePlan, fastest_tree
from outrider.runtime import HFModel, Nodes
from outrider.sampling import Sampling, Warp
from outrider.verifiers import Distinct, Greedy, Rejection

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_LEVEL = 8  # nodes of the level for which the draft model is timed
_REPEATS = 7


@dataclass(frozen=True)
class PairPlan:
    """The measurements of a pair and the planned trees.

    Attributes:
        acceptance: share of the positions at which the child of each rank was accepted.
        num_positions: number of positions that were counted.
        target_seconds: seconds of a target forward pass, by its number of nodes.
        draft_seconds: seconds of a draft forward pass over one level.
        tree: the tree with the fewest seconds per token.
        chain: the chain with the fewest seconds per token.
    """

    acceptance: list[float]
    num_positions: int
    target_seconds: dict[int, float]
    draft_seconds: float
    tree: TreePlan
    chain: TreePlan


def plan_for_pair(
    target: HFModel,
    draft: HFModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    num_nodes: int = 64,
    depth: int = 8,
    width: int = 16,
    num_rounds: int = 32,
    eos_ids: frozenset[int] = frozenset(),
    progress: Callable[[str], None] = lambda stage: None,
) -> PairPlan:
    """Measures the pair, then plans. Must run in inference mode.

    Args:
        target: the target model.
        draft: the draft model.
        prompts: token ids, at least one prompt; passes are timed after the longest one.
        sampling: with which the trees will be used.
        num_nodes: most nodes, the root included.
        depth: most levels.
        width: ranks to measure.
        num_rounds: rounds per prompt.
        eos_ids: tokens that end a sequence.
        progress: called with a description of each stage before it starts.
    """
    progress("acceptance by rank")
    counts = count_ranks(target, draft, prompts, sampling, width, num_rounds, eos_ids)
    num_positions = sum(counts)
    acceptance = [count / max(num_positions, 1) for count in counts[:-1]]
    progress("times of forward passes")
    longest = max(prompts, key=len)
    sizes = [n for n in _SIZES if n < num_nodes] + [num_nodes]
    times = {n: target_pass_seconds(target, longest, n) for n in sizes}
    draft_seconds = draft_pass_seconds(draft, longest, min(_LEVEL, num_nodes))
    progress("planning")

    def seconds(num: int) -> float:
        return interpolated(times, num)

    tree = fastest_tree(acceptance, num_nodes, depth, seconds, draft_seconds)
    chain = fastest_tree(acceptance[:1], num_nodes, depth, seconds, draft_seconds)
    return PairPlan(acceptance, num_positions, times, draft_seconds, tree, chain)


def count_ranks(
    target: HFModel,
    draft: HFModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    width: int,
    num_rounds: int,
    eos_ids: frozenset[int] = frozenset(),
    children: Literal["iid", "distinct"] = "distinct",
) -> list[int]:
    """How often the child of each rank was accepted, and as the last number, how often none was.

    Args:
        target: the target model.
        draft: the draft model.
        prompts: token ids, at least one prompt.
        sampling: of all rows.
        width: number of ranks, the children that are drafted at the root.
        num_rounds: rounds per prompt, unless its sequence ends before.
        eos_ids: tokens that end a sequence.
        children: whether the children are drawn with or without replacement.
    """
    drafter = TreeDrafter(draft, target.num_tokens, Topology.expansion([width]), children)
    rules: dict[str, Verifier] = {"iid": Rejection(), "distinct": Distinct()}
    verifier = Greedy() if sampling.greedy else rules[children]
    limit = min(target.limit, draft.limit)
    counts = [0] * (width + 1)
    context = _context(prompts, sampling, target)
    cache, state = start_batch(context, target, drafter)
    for _ in range(num_rounds):
        parts = context, target, cache, drafter, state
        round_ = run_round(*parts, verifier, Budget(1))
        num_accepted = round_.verdict.num_accepted_B.tolist()
        commit_round(*parts, round_, num_accepted)
        lines = zip(round_.verdict.path_BD[:, 0].tolist(), round_.emitted_BK.tolist(), strict=True)
        unfinished = []
        for row, (node, tokens) in enumerate(lines):
            counts[node - 1 if num_accepted[row] else width] += 1
            ended = eos_ids.intersection(tokens[: num_accepted[row] + 1])
            if not ended and context.lengths[row] + 2 < limit:
                unfinished.append(row)
        if not unfinished:
            break
        if len(unfinished) < context.num_rows:
            for part in (cache, state, context):
                part.keep(unfinished)
            samplings = [sampling] * len(unfinished)
            context.distribution = Warp(samplings, target.num_tokens, target.device)
    return counts


def target_pass_seconds(target: HFModel, prompt: Sequence[int], num_nodes: int) -> float:
    """Median seconds that the target takes to score a tree of this many nodes after a prompt."""
    context = _context([prompt], Sampling(), target)
    cache = target.start(context)
    root_B1 = context.root_B[:, None]

    def score() -> None:
        tokens_BN = root_B1.expand(1, num_nodes)
        parents_BN = torch.zeros_like(tokens_BN)
        parents_BN[:, 0] = -1
        mask_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        target.score(cache, Draft(tokens_BN, parents_BN, mask_BN, None, "chosen"))

    return _median_seconds(score, target)


def draft_pass_seconds(draft: HFModel, prompt: Sequence[int], num_nodes: int) -> float:
    """Median seconds of a draft forward pass over this many nodes of one level."""
    context = _context([prompt], Sampling(), draft)
    cache = draft.start(context)
    tokens_BN = context.root_B[:, None].expand(1, num_nodes).clamp(max=draft.num_tokens - 1)
    self_BNN = torch.eye(num_nodes, dtype=torch.bool, device=draft.device)[None]
    nodes = Nodes(self_BNN, torch.zeros_like(tokens_BN))
    return _median_seconds(lambda: draft.extend(cache, tokens_BN, nodes), draft)


def _context(prompts: Sequence[Sequence[int]], sampling: Sampling, model: HFModel) -> Context:
    B = len(prompts)
    distribution = Warp([sampling] * B, model.num_tokens, model.device)
    return Context.start(prompts, distribution, [sampling.seed or 0] * B, range(B), model.device)


def _median_seconds(work: Callable[[], Any], model: HFModel) -> float:
    seconds = []
    for _ in range(_REPEATS + 2):  # the first two are warm-up
        began = time.perf_counter()
        work()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])
