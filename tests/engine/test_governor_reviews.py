"""Reviews: their labels are those of the models' distributions, outputs do not depend on them, and
a draft that becomes good is found soon."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from simulated_rounds import Machine, Simulation, constant
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.core import REVIEW_WIDTH
from outrider.drafters.chain.model import ModelDrafter
from outrider.engine.governor.acceptance import PositionRates, probability
from outrider.engine.governor.allocation import Goodput
from outrider.engine.governor.batch_governor import BatchGovernor
from outrider.engine.governor.counts import Counts
from outrider.engine.governor.governor import GAIN_SHARE, REVIEW_SHARE, Governor
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.reviews import MOST_REVIEWED
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.governor.sources import Sources
from outrider.runtime import HFModel

TARGET = tiny(dtype=torch.float64, std=0.2)
DRAFT = tiny(dtype=torch.float64, seed=0, std=0.19)
PROMPTS = ragged_prompts([9, 5, 1])  # a batch runs the longest first
AUTO: Any = "auto"
ROUNDS = 30
REVIEWED_IN = (7, 10, 29)
REVIEWS = (3, 8, 14, 40, 44)


@dataclass
class Script:
    """What governors ask for, and the labels that they get.

    Attributes:
        lengths: by round, the draft length; 0 after the last.
        reviews: rounds that review.
        behind: tokens that the draft model is said to lack in these rounds.
        labels: by such a round, the labels of each row.
    """

    lengths: Sequence[int] = ()
    reviews: Sequence[int] = REVIEWED_IN
    behind: int = 0
    labels: dict[int, Any] = field(default_factory=dict)
    rounds: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "Script":
        def ask(
            governor: BatchGovernor, rows: Any, limits: Sequence[int], _: bool, reviewable: int
        ) -> Asked:
            number, self.rounds = self.rounds, self.rounds + 1
            length = min([*self.lengths, 0][min(number, len(self.lengths))], max(limits))
            reviews = number in self.reviews and reviewable > 0 and not length
            each = [min(length, limit) for limit in limits]
            return Asked(0, length, each, behind=self.behind, reviews=reviews)

        def learn(governor: BatchGovernor, asked: Asked, *more: Any, overlaps: Any) -> None:
            if asked.reviews:
                self.labels[self.rounds - 1] = more[-1]

        monkeypatch.setattr(BatchGovernor, "ask", ask)
        monkeypatch.setattr(BatchGovernor, "learn", learn)
        return self


def distribution(model: Any, tokens: Sequence[int], sampling: Sampling) -> torch.Tensor:
    """After each token."""
    logits_TV = model.module(torch.tensor([list(tokens)])).logits[0].detach()
    if sampling.greedy:
        return torch.nn.functional.one_hot(logits_TV.argmax(-1), logits_TV.shape[-1]).double()
    logits_TV = logits_TV.float() / sampling.temperature
    if sampling.top_k:
        least_T1 = logits_TV.topk(sampling.top_k).values[:, -1:]
        logits_TV = logits_TV.masked_fill(logits_TV < least_T1, -torch.inf)
    return logits_TV.softmax(-1)


@pytest.mark.parametrize("behind", [0, REVIEW_WIDTH + 1])
@pytest.mark.parametrize(
    "samplings",
    [
        [Sampling(temperature=0.0)] * 3,
        [
            Sampling(temperature=0.8, seed=3),
            Sampling(temperature=0.0),
            Sampling(temperature=1.0, top_k=5, seed=4),
        ],
    ],
)
def test_labels_are_the_acceptance_of_the_newest_tokens(
    samplings: list[Sampling], behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the draft model lacks many tokens, of what it makes of the newest ones alone."""
    script = Script(behind=behind).install(monkeypatch)
    engine = engine_of(TARGET, DRAFT, "speculative", AUTO)
    each = [replace(s, max_new_tokens=ROUNDS, ignore_eos=True) for s in samplings]
    results = engine.generate(PROMPTS, each)
    assert set(script.labels) == set(REVIEWED_IN)
    before = 0
    for number, labels in script.labels.items():
        num = min(number - before, MOST_REVIEWED)
        for prompt, result, sampling, found in zip(PROMPTS, results, each, labels, strict=True):
            tokens = [*prompt, *result.token_ids]
            last = len(prompt) + number
            width = min(REVIEW_WIDTH, min(map(len, PROMPTS)) + number - 1)
            first = last - 1 - width if behind else 0
            p_TV = distribution(TARGET, tokens, sampling)
            q_TV = torch.zeros_like(p_TV)
            q_TV[first:] = distribution(DRAFT, tokens[first:], sampling)
            ratios = [(q_TV / p_TV)[t - 1, tokens[t]].item() for t in range(last - num, last)]
            assert found == pytest.approx([min(1.0, ratio) for ratio in ratios], abs=1e-4)
        before = number
    assert 0 < sum(map(sum, script.labels[29])) < 3 * MOST_REVIEWED


@pytest.mark.parametrize("behind", [0, REVIEW_WIDTH + 1])
def test_a_review_reads_in_one_pass(behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what a look at the draft model costs: the dearer, the fewer of them there are."""
    script = Script(behind=behind).install(monkeypatch)
    review, forward = ModelDrafter.review, HFModel.forward
    read: list[HFModel] = []
    passes: list[int] = []

    def noting_forward(self: HFModel, *arguments: Any) -> Any:
        read.append(self)
        return forward(self, *arguments)

    def counting_review(self: ModelDrafter, *arguments: Any) -> Any:
        read.clear()
        q_BK = review(self, *arguments)
        passes.append(len(read))
        return q_BK

    monkeypatch.setattr(ModelDrafter, "review", counting_review)
    monkeypatch.setattr(HFModel, "forward", noting_forward)
    sampling = Sampling(max_new_tokens=ROUNDS, ignore_eos=True)
    engine_of(TARGET, DRAFT, "speculative", AUTO).generate(ragged_prompts([9, 8, 7]), sampling)
    assert set(script.labels) == set(REVIEWED_IN)
    assert passes == [1] * len(REVIEWED_IN)


@pytest.mark.parametrize(
    ("method", "temperature"), [("block", 0.0), ("block", 0.9), ("hybrid", 0.9)]
)
def test_reviews_change_no_output(
    method: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the draft model has read tokens in a review or for a draft, it drafts the same."""
    lengths = [0] * 9 + [3, 2] + [0] * 30 + [4, 1, 0, 0, 2]
    sampling = Sampling(temperature=temperature, max_new_tokens=70, ignore_eos=True, seed=1)
    outputs = []
    for reviews, behind in ((), 0), (REVIEWS, 0), (REVIEWS, REVIEW_WIDTH + 1):
        script = Script(lengths, reviews, behind).install(monkeypatch)
        results = engine_of(TARGET, DRAFT, method, AUTO).generate(PROMPTS, sampling)
        outputs.append((token_ids(results), results.stats.accepted))
        assert all(script.labels.values())
        assert len(script.labels) == len(reviews)
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0][1] > 0


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        ("speculative", Sampling(temperature=0.8, repetition_penalty=1.2)),
        ("coupled", Sampling(temperature=0.8)),
        ("mentored", Sampling(temperature=0.8)),
        ("top-k-tree", Sampling(temperature=0.8)),
        ("early-exit", Sampling(temperature=0.0)),
    ],
)
def test_nothing_is_reviewed_where_the_overlap_is_not_what_is_accepted(
    method: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, which reviews do not know, lossy rules, and drafts without a model of their own:
    no labels, and the output is not disturbed."""
    script = Script().install(monkeypatch)
    draft = None if method == "early-exit" else DRAFT
    engine = engine_of(TARGET, draft, method, AUTO)
    engine.generate(PROMPTS, replace(sampling, max_new_tokens=20, ignore_eos=True, seed=2))
    assert not any(script.labels.values())


MACHINES = {
    "memory-bound": Machine(per_token=0.003, step=0.1),
    "cold caches": Machine(per_token=0.003, step=0.1, cold=1.0),
    "in between": Machine(per_token=0.03, step=0.1),
}


@pytest.mark.parametrize(
    ("machine", "rows"), [*itertools.product(MACHINES, [1]), ("cold caches", 4)]
)
def test_a_draft_that_becomes_good_is_found_within_20_rounds(machine: str, rows: int) -> None:
    """In 13 of 16 runs, on machines whose draft step takes a tenth of a target pass."""
    late = 0
    for seed in range(16):
        simulation = Simulation(MACHINES[machine], rows, seed, can_review=True)
        simulation.run(200, constant(0.02))
        simulation.run(20, constant(0.85))
        lengths = simulation.run(10, constant(0.85)).lengths()
        late += sum(length > 0 for length in lengths) < 8
    assert late <= 3


@pytest.mark.parametrize(
    ("machine", "rows"), [("memory-bound", 1), ("memory-bound", 8), ("cold caches", 1)]
)
def test_reviews_of_a_useless_draft_take_little(machine: str, rows: int) -> None:
    simulation = Simulation(MACHINES[machine], rows, seed=2, can_review=True)
    simulation.run(200, constant(0.02))
    run = simulation.run(1500, constant(0.02))
    plain = MACHINES[machine].goodput(rows, 0, constant(0.02))
    assert 1 - run.goodput / plain < 2 * REVIEW_SHARE
    assert sum(each.reviews for each in run.asked) > 10


def test_reviews_are_seldom_where_reading_takes_long() -> None:
    """Each token that the draft model reads takes twice its step: a batch that computation bounds.
    However long a review waits, it reads no more than a few tokens, so that there is a look."""
    simulation = Simulation(MACHINES["in between"], 64, seed=2, can_review=True)
    simulation.run(200, constant(0.02))
    run = simulation.run(1500, constant(0.02))
    plain = MACHINES["in between"].goodput(64, 0, constant(0.02))
    assert 1 - run.goodput / plain < REVIEW_SHARE
    assert 1 <= sum(each.reviews for each in run.asked) <= 6


def test_a_review_does_not_recede_where_each_round_makes_it_dearer() -> None:
    """By a fifteenth of a round, so that it would take longer than a round after some 16 rounds;
    credit was saved up for four."""
    simulation = Simulation(Machine(per_token=0.1, step=0.2), 4, can_review=True)
    simulation.run(200, constant(0.95))
    simulation.governor.review_credit = 4.0
    asked = simulation.run(80, constant(0.02)).asked
    assert sum(each.reviews for each in asked) >= 4


def test_a_draft_model_that_lacks_much_lacks_it_after_a_review() -> None:
    """It has read the newest tokens alone; where it lacks few, it has read them all."""
    for behind, left in ((REVIEW_WIDTH, 1), (REVIEW_WIDTH + 1, REVIEW_WIDTH + 2)):
        batch, rows = BatchGovernor(Governor(Sources())), [RowMemory(True)]
        rows[0].of(0).undrafted = behind
        asked = Asked(0, 0, [0], believed=Goodput(1.0, 1.0), behind=behind, reviews=True)
        batch.learn(asked, rows, [0], True, 0.5, 1.5, reviewed=[[1.0] * 8])
        assert rows[0].of(0).undrafted == left


def test_drafts_that_gain_pay_for_reviews() -> None:
    governor = Governor(Sources())
    governor.review_credit = 0.0
    governor.earn_reviews(10.0)
    assert governor.review_credit == pytest.approx(10 * GAIN_SHARE)
    governor.earn_reviews(1000.0)
    assert governor.review_credit < 10  # a bound on how much is saved up


def test_many_labels_weigh_like_some_rounds() -> None:
    few, many = PositionRates(), PositionRates()
    few.review([0.0] * 24, 1)
    many.review([0.0] * 512, 1)
    for rates in (few, many):
        for number in range(2, 12):
            rates.learn([Counts.of(1, 1)] * 4, number)
    assert [probability(rates.odds(1)[0]) for rates in (few, many)] == pytest.approx(
        [0.72] * 2, abs=0.1
    )


def test_a_greedy_output_does_not_depend_on_reviews() -> None:
    """Of a real governor."""
    plain = token_ids(engine_of(TARGET).generate(PROMPTS, greedy(60)))
    engine = engine_of(TARGET, DRAFT, "speculative", AUTO)
    for _ in range(2):
        assert token_ids(engine.generate(PROMPTS, greedy(60))) == plain
