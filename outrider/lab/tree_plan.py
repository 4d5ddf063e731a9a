"""Measures a pair of models and works out which token tree pays best on it.

Two things are measured: how often the b-th best of a node's children is the one that is accepted,
in rounds with a wide tree of one level; and how long passes take, of the target over 1 to
``num_nodes`` nodes, of the draft model over one level. ``analysis.tree_plan`` does the rest.

What verification itself costs is not part of it, nor is what a tree costs beyond a chain of as many
nodes; measure the tree that comes out against a chain before relying on it.

Legend: B rows, N nodes, n columns of a pass.
"""

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from outrider.core import Budget, Context, Draft, Verifier, commit_round, run_round
from outrider.drafters.tree.static import TreeDrafter
from outrider.drafters.tree.topology import Topology
from outrider.lab.analysis.tree_plan import TreePlan, fastest_tree
from outrider.runtime import HFModel, Nodes
from outrider.sampling import Sampling, Warp
from outrider.verifiers import Distinct, Greedy, Rejection

_COLUMNS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_LEVEL = 8  # nodes of a level whose draft pass is timed
_REPEATS = 7


@dataclass(frozen=True)
class PairPlan:
    """What was measured, and the trees that follow.

    Attributes:
        acceptance: share of the places at which the child of each rank was accepted.
        num_places: places that were counted.
        target_seconds: of a target pass, by its number of nodes.
        draft_seconds: of a draft pass over one level.
        tree: the fewest seconds per token.
        chain: the same among trees with one child per node.
    """

    acceptance: list[float]
    num_places: int
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
    """Measures, then plans. Run it in inference mode.

    Args:
        target: the target.
        draft: the draft model.
        prompts: token ids, at least one prompt; passes are timed behind the longest.
        sampling: of the texts that the trees are for.
        num_nodes: most nodes, the root included.
        depth: most levels.
        width: ranks to measure.
        num_rounds: rounds per prompt.
        eos_ids: tokens that end a text.
        progress: is told what is going on.
    """
    progress("acceptance by rank")
    counts = count_ranks(target, draft, prompts, sampling, width, num_rounds, eos_ids)
    num_places = sum(counts)
    acceptance = [count / max(num_places, 1) for count in counts[:-1]]
    progress("pass times")
    longest = max(prompts, key=len)
    columns = [n for n in _COLUMNS if n < num_nodes] + [num_nodes]
    times = {n: target_pass_seconds(target, longest, n) for n in columns}
    draft_seconds = draft_pass_seconds(draft, longest, min(_LEVEL, num_nodes))
    progress("planning")

    def seconds(num: int) -> float:
        return interpolated(times, num)

    tree = fastest_tree(acceptance, num_nodes, depth, seconds, draft_seconds)
    chain = fastest_tree(acceptance[:1], num_nodes, depth, seconds, draft_seconds)
    return PairPlan(acceptance, num_places, times, draft_seconds, tree, chain)


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
    """At how many places the child of each rank was accepted; the last number: none was."""
    drafter = TreeDrafter(draft, target.num_tokens, Topology.expansion([width]), children)
    rules: dict[str, Verifier] = {"iid": Rejection(), "distinct": Distinct()}
    verifier = Greedy() if sampling.greedy else rules[children]
    limit = min(target.limit, draft.limit)
    counts = [0] * (width + 1)
    context = _context(prompts, sampling, target)
    cache, state = target.start(context), drafter.start(context)
    for _ in range(num_rounds):
        parts = context, target, cache, drafter, state
        round_ = run_round(*parts, verifier, Budget(1))
        num_accepted = round_.verdict.num_accepted_B.tolist()
        commit_round(*parts, round_, num_accepted)
        lines = zip(round_.verdict.path_BD[:, 0].tolist(), round_.emitted_BK.tolist(), strict=True)
        stays = []
        for row, (node, tokens) in enumerate(lines):
            counts[node - 1 if num_accepted[row] else width] += 1
            ended = eos_ids.intersection(tokens[: num_accepted[row] + 1])
            if not ended and context.lengths[row] + 2 < limit:
                stays.append(row)
        if not stays:
            break
        if len(stays) < context.num_rows:
            for part in (cache, state, context):
                part.keep(stays)
            context.distribution = Warp([sampling] * len(stays), target.num_tokens, target.device)
    return counts


def target_pass_seconds(target: HFModel, prompt: Sequence[int], num_nodes: int) -> float:
    """Median time of scoring a tree of so many nodes behind a prompt."""
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
    """Median time of a pass over the nodes of one level."""
    context = _context([prompt], Sampling(), draft)
    cache = draft.start(context)
    tokens_Bn = context.root_B[:, None].expand(1, num_nodes).clamp(max=draft.num_tokens - 1)
    self_Bnn = torch.eye(num_nodes, dtype=torch.bool, device=draft.device)[None]
    nodes = Nodes(self_Bnn, torch.zeros_like(tokens_Bn))
    return _median_seconds(lambda: draft.extend(cache, tokens_Bn, nodes), draft)


def interpolated(times: dict[int, float], num: int) -> float:
    """The time of so many nodes, on the line between the measured neighbours."""
    columns = sorted(times)
    i = bisect_left(columns, num)
    if columns[i] == num:
        return times[num]
    low, high = columns[i - 1], columns[i]
    share = (num - low) / (high - low)
    return (1 - share) * times[low] + share * times[high]


def _context(prompts: Sequence[Sequence[int]], sampling: Sampling, model: HFModel) -> Context:
    B = len(prompts)
    distribution = Warp([sampling] * B, model.num_tokens, model.device)
    return Context.start(prompts, distribution, [sampling.seed] * B, range(B), model.device)


def _median_seconds(work: Callable[[], Any], model: HFModel) -> float:
    seconds = []
    for _ in range(_REPEATS + 2):  # the first two warm up
        began = time.perf_counter()
        work()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])
