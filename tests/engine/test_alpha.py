"""α is E[Σ min(p, q)] over the positions that token-level rejection sampling verifies.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from real_tokenizers import words
from tiny_models import engine_of, full_logits, tiny_module
from torch import Tensor

from outrider import Sampling
from outrider.core import Budget, Context, Draft, Drawn, Ends, at_node
from outrider.core.overlap import estimated_overlap, overlap_down
from outrider.runtime import HFModel
from outrider.testing import SoftmaxDistribution, ToyDrafter, ToyModel

# ------------------------------------------------------------ exactly, on toys with a context

V, PROMPT = 3, (0, 1)
TARGET, GUESS = ToyModel.random(V, seed=41), ToyModel.random(V, seed=42)


@cache
def distribution(model: ToyModel | str, tokens: tuple[int, ...]) -> list[float]:
    """A toy's distribution after the prompt and these tokens."""
    toy = {"p": TARGET, "q": GUESS}[str(model)]
    past = torch.tensor(0)
    for token in (*PROMPT, *tokens):
        past = toy.read(past, torch.tensor(token))
    return toy.logits(past).softmax(-1).tolist()


def exact(num_tokens: int, end: int | None) -> tuple[float, float]:
    """E Σ w r and E Σ w over all prefixes; w is the mass that both distributions share."""
    weighted = reached = 0.0
    for depth in range(num_tokens):
        for path in product(range(V), repeat=depth):
            if end in path:
                continue
            mass = 1.0
            for i, x in enumerate(path):
                mass *= min(distribution("p", path[:i])[x], distribution("q", path[:i])[x])
            reached += mass
            weighted += mass * sum(map(min, distribution("p", path), distribution("q", path)))
    return weighted, reached


def every_draft(drawn: Drawn, width: int, num_nodes: int) -> tuple[Draft, Tensor, Tensor]:
    """Every possible draft, one per row, with the target's distributions and its probability."""
    drafts = list(product(range(V), repeat=num_nodes - 1))
    B = len(drafts)
    context = Context.start([PROMPT] * B, SoftmaxDistribution(), [0] * B, range(B))
    budget = Budget(num_nodes - 1)
    shape = ToyDrafter(GUESS, width, "iid").propose(
        GUESS.start(context), context, budget, context.rng
    )
    tokens_BN = torch.cat([context.root_B[:, None], torch.tensor(drafts)], 1)
    draft = replace(shape, tokens_BN=tokens_BN, drawn=drawn)
    p_BNV, q_BNV = (
        m.logits(m.read_draft(m.start(context).past_B, draft)).softmax(-1) for m in (TARGET, GUESS)
    )
    chance_B = torch.ones(B, dtype=torch.float64)
    rows_B = torch.arange(B)
    for i in range(1, num_nodes):
        q_BV = q_BNV[rows_B, draft.parents_BN[:, i]]
        if drawn == "distinct":
            for j in range(1, i):
                if draft.parents_BN[0, j] == draft.parents_BN[0, i]:
                    q_BV = q_BV.scatter(1, tokens_BN[:, j, None], 0.0)
            q_BV = q_BV / q_BV.sum(1, keepdim=True)
        chance_B = chance_B * q_BV[rows_B, tokens_BN[:, i]]
    return replace(draft, probs_BNV=q_BNV), p_BNV, chance_B


@pytest.mark.parametrize("end", [None, 0, 2])
@pytest.mark.parametrize(
    ("drawn", "width", "num_nodes", "depth"),
    [("iid", 1, 4, 3), ("chosen", 1, 4, 3), ("iid", 2, 6, 2), ("distinct", 2, 6, 2)],
    ids=["chain", "shared noise", "tree", "distinct tree"],
)
def test_the_estimate_is_unbiased(
    drawn: Drawn, width: int, num_nodes: int, depth: int, end: int | None
) -> None:
    """The estimate depends on the draft only, not on the rule. Sequences may end inside a draft."""
    draft, p_BNV, chance_B = every_draft(drawn, width, num_nodes)
    if drawn == "chosen":  # by noise that it shares with the rule
        q_BD = draft.probs_BNV[:, :-1].gather(2, draft.tokens_BN[:, 1:, None])[..., 0]
        one_B1 = torch.ones_like(q_BD[:, :1])
        draft = replace(draft, probs_BNV=None, drawn_probs_BN=torch.cat([one_B1, q_BD], 1))
    ends = Ends.of([() if end is None else (end,)] * len(chance_B), [99] * len(chance_B))
    found = estimated_overlap(ends.cut(draft), p_BNV)
    sums = [float((chance_B * x_BD.sum(1)).sum()) for x_BD in (found.overlap_BD, found.reached_BD)]
    assert sums == pytest.approx(exact(depth, end), abs=1e-12)


@pytest.mark.parametrize("drawn", ["iid", "distinct"])
@pytest.mark.parametrize("end", [None, 2])
def test_the_estimate_down_a_tree_is_the_same(drawn: Drawn, end: int | None) -> None:
    """Node by node, as programs compute it that choose which distributions to compute."""
    draft, p_BNV, _ = every_draft(drawn, 2, 6)
    num_rows = len(p_BNV)
    ends = Ends.of([() if end is None else (end,)] * num_rows, [99] * num_rows)
    draft = ends.cut(draft)
    found = overlap_down(draft, partial(at_node, p_BNV))
    for one_BD, other_BD in zip(found, estimated_overlap(draft, p_BNV), strict=True):
        torch.testing.assert_close(one_BD.double(), other_BD)


def test_a_copied_token_is_a_point_mass() -> None:
    """Its overlap is p(x), and the next position is reached with that probability."""
    p_BNV = torch.tensor([[[0.2, 0.8], [0.5, 0.5], [0.1, 0.9]]])
    draft = Draft.chain(torch.tensor([[0, 1, 0]]), None, None, "chosen")
    found = estimated_overlap(draft, p_BNV)
    torch.testing.assert_close(found.reached_BD, torch.tensor([[1.0, 0.8]]))
    torch.testing.assert_close(found.overlap_BD, torch.tensor([[0.8, 0.4]]))


# ------------------------------------------------- by engines, on models without a context

EOS, WORDS = 2, 12


def constant(seed: int) -> HFModel:
    """A model with the same distribution after every prefix: all its token embeddings are equal."""
    module = tiny_module(seed=seed, dtype=torch.float64, vocab_size=WORDS, eos_token_id=EOS)
    with torch.no_grad():
        table = module.get_input_embeddings().weight
        table.copy_(table[:1].expand_as(table))
    return HFModel(module, words([*(f"w{i}" for i in range(WORDS - 1)), "<unk>"]))


MODEL, DRAFT = constant(1), constant(4)
T = 1.6


def constant_distribution(model: HFModel, num_layers: int | None = None) -> Tensor:
    module: Any = model.module
    if num_layers is None:
        return (full_logits(module, [0])[0] / T).softmax(-1)
    with torch.no_grad():
        hidden = module.model(torch.tensor([[0]]), output_hidden_states=True).hidden_states
        return (module.lm_head(module.model.norm(hidden[num_layers]))[0, 0] / T).softmax(-1)


P, Q = constant_distribution(MODEL), constant_distribution(DRAFT)


def shared(q_V: Tensor) -> float:
    return float(torch.minimum(P, q_V).sum())


@dataclass(frozen=True)
class Case:
    """A method and the α that it must report."""

    method: str
    alpha: Callable[[], float] = lambda: shared(Q)
    options: Any = None


CASES = [
    *(Case(name) for name in ("speculative", "block", "sample-match", "coupled", "staged")),
    *(Case(name) for name in ("specinfer", "sequoia", "traversal", "spectr")),
    Case("lenience", options={"lenience": 0.4}),
    Case("hybrid", options={"sources": "model"}),
    Case("mjsd"),
    Case("top-k-tree", lambda: float(P[Q.argmax()])),
    Case("dynamic-tree", lambda: float(P[Q.argmax()]), {"num_nodes": 6, "width": 2, "depth": 3}),
    Case("early-exit", lambda: shared(constant_distribution(MODEL, 1))),
    Case("uniform", lambda: shared(torch.full_like(P, 1 / WORDS))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method} {case.options or ''}")
def test_every_method_reports_the_overlap(case: Case) -> None:
    """False-alarm probability 6e-7 per method; a bias of 0.04 is four standard deviations or more.

    The end-of-sequence token is frequent, and stop tokens end half of the rows even earlier. So
    many sequences end inside accepted tokens, and many more inside drafts.
    """
    num_rows = 150
    engine = engine_of(
        MODEL, DRAFT, case.method, 4, options=case.options, max_batch_size=num_rows, measure=False
    )
    stop: Sequence[Any] = [(), (5, "w7 w8")]
    samplings = [
        Sampling(temperature=T, max_new_tokens=24, seed=3, stop=stop[row % 2])
        for row in range(num_rows)
    ]
    stats = [result.stats for result in engine.generate([[1]] * num_rows, samplings)]
    alpha = case.alpha()
    off_B = torch.tensor([s.overlap - alpha * s.reached for s in stats], dtype=torch.float64)
    assert float(off_B.abs().mean()) < 1e-9 or abs(off_B.mean()) < 5 * off_B.std() / num_rows**0.5
    reached = sum(s.reached for s in stats)
    assert float(off_B.std() * num_rows**0.5 / reached) < 1 / 100
