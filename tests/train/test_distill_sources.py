"""Where rows come from: fixed samples, the draft's own samples, replay, mixtures."""

from collections import Counter

import pytest
import torch
from tiny_distillation import target

from outrider.runtime import HFModel
from outrider.train.distill.answers import Answering, plain_engine
from outrider.train.distill.prompts import Reader
from outrider.train.distill.sample import Sample
from outrider.train.distill.scoring import Scorer
from outrider.train.distill.sources import DraftSamples, FixedRows, StepRows, interleaved
from outrider.train.distill.start import from_layers
from outrider.train.distill.store import Dataset

HOW = Answering((1.0,), max_tokens=8, length=48, seed=1)
DATASET = Dataset([Sample(tuple(range(2, 6 + number % 9)), 2) for number in range(30)], None)


@pytest.fixture(scope="module")
def model():
    return target()


def draft_samples(model, buffer, draft=None):
    module = draft or from_layers(model.module, (0, 2))
    read = Reader(model.tokenizer, "target")
    prompts = [read.encode(f"print({number})") for number in range(5)]
    scorer = Scorer(model.module, 6, 1.0, model.num_tokens, 48)
    engine = plain_engine(HFModel(module, model.tokenizer, "draft"), 4)
    return DraftSamples(
        engine, prompts, HOW, scorer.scored, every=3, per_refresh=4, buffer=buffer, capacity=48
    )


def test_fixed_rows_hold_each_sample_once_an_epoch():
    rows = FixedRows(DATASET, 40, seed=0)
    seen: list[Sample] = []
    number = 0
    while len(seen) < 30:
        seen += rows.row(number)
        number += 1
    assert sorted(each.tokens for each in seen) == sorted(each.tokens for each in DATASET.samples)


def test_the_draft_answers_anew_every_few_steps_with_the_weights_of_then(model):
    draft = from_layers(model.module, (0, 2))
    source = draft_samples(model, 4, draft)
    source.prepare(0)
    first = source.samples
    source.prepare(1)
    assert source.samples is first
    with torch.no_grad():
        draft.lm_head.weight.neg_()
    source.prepare(3)
    second = source.samples
    assert len(first) == len(second) == 4
    assert not {each.tokens for each in first} & {each.tokens for each in second}
    prompts = {each.tokens[: each.first] for each in [*first, *second]}
    assert len(prompts) == 5  # all five in turn, some twice


def test_the_draft_samples_its_own_distribution(model):
    """An untruncated sample of the draft, not the target's answer: its first tokens, over many
    refreshes, have the draft's frequencies. χ² with a false-alarm probability of 1e-6."""
    from scipy.stats import chisquare

    source = draft_samples(model, 4)
    source.prompts = source.prompts[:1]
    source.per_refresh, source.buffer = 600, 600
    source.score = list
    source.prepare(0)
    prompt = source.prompts[0].tokens
    q_V = source.engine.target.module(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    counts = Counter(each.tokens[each.first] for each in source.samples)
    top = q_V.topk(12).indices.tolist()
    observed = [counts[token] for token in top]
    expected = [600 * q_V[token].item() for token in top]
    observed.append(600 - sum(observed))
    expected.append(600 - sum(expected))
    assert chisquare(observed, expected, sum_check=False).pvalue > 1e-6


def test_cells_of_draft_samples_are_the_targets(model):
    source = draft_samples(model, 4)
    source.prepare(0)
    scorer = Scorer(model.module, 6, 1.0, model.num_tokens, 48)
    scorer.capacity = 0
    for sample in source.samples:
        (expected,) = scorer.cells([sample])
        torch.testing.assert_close(sample.cells.log_p_NC, expected.log_p_NC, atol=1e-4, rtol=1e-4)


def test_a_replay_buffer_keeps_earlier_samples(model):
    source = draft_samples(model, 10)
    buffers = []
    for step in range(0, 12, 3):
        source.prepare(step)
        buffers.append([each.tokens for each in source.samples])
    assert [len(buffer) for buffer in buffers] == [4, 8, 10, 10]
    assert buffers[1][:4] == buffers[0]
    assert buffers[2][:6] == buffers[1][2:]
    assert {each.tokens for number in range(20) for each in source.row(number)} == set(buffers[3])


def test_a_restored_buffer_goes_on_as_the_original(model):
    source, again = draft_samples(model, 10), draft_samples(model, 10)
    for step in range(5):
        source.prepare(step)
    again.load_state_dict(source.state_dict())
    for step in range(5, 9):
        source.prepare(step)
        again.prepare(step)
        for number in range(4):
            one, other = source.row(number), again.row(number)
            assert [each.tokens for each in one] == [each.tokens for each in other]
            for left, right in zip(one, other, strict=True):
                assert torch.equal(left.cells.log_p_NC, right.cells.log_p_NC)


def test_a_mixture_has_its_shares_evenly_spread():
    pattern = interleaved({"a": 0.5, "b": 0.35, "c": 0.15})
    assert Counter(pattern) == {"a": 10, "b": 7, "c": 3}
    assert "aaa" not in "".join(pattern * 2)
    assert interleaved({"a": 1.0}) == ["a"]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({}, "sum to 0"),
        ({"a": 0.5}, "sum to 0.5; they must be positive and sum to 1"),
        ({"a": 1.5, "b": -0.5}, "must be positive"),
        ({"a": 0.99, "b": 0.01}, "share 0.99 of a: must be a multiple of 0.05"),
    ],
)
def test_shares_that_are_none(shares, message):
    with pytest.raises(ValueError, match=message):
        interleaved(shares)


def test_a_mixture_takes_each_sources_rows_in_order():
    class Numbered:
        def __init__(self, token):
            self.token, self.asked, self.steps = token, [], []

        def prepare(self, step):
            self.steps.append(step)

        def row(self, number):
            self.asked.append(number)
            return [Sample((1, self.token), 1)]

        def state_dict(self):
            return {"asked": len(self.asked)}

        def load_state_dict(self, state):
            self.asked = [None] * state["asked"]

    a, b = Numbered(7), Numbered(8)
    rows = StepRows({"a": (a, 0.25), "b": (b, 0.75)}, rows=6)
    labels = [row.labels_N.item() for step in range(10) for row in rows(step)]
    assert a.asked == list(range(15))
    assert b.asked == list(range(45))
    assert labels.count(7) == 15
    assert a.steps == list(range(10))
    sources = {"a": {"asked": 15}, "b": {"asked": 45}}
    assert rows.state_dict() == {"positions": 60, "sources": sources}
    other = {"positions": 7, "sources": {"a": {"asked": 2}, "b": {"asked": 1}}}
    rows.load_state_dict(other)
    assert rows.state_dict() == other


def test_prompts_that_leave_no_room_for_an_answer(model):
    source = draft_samples(model, 4)
    source.how = Answering((1.0,), max_tokens=8, length=4, seed=1)
    with pytest.raises(ValueError, match="leaves room for an answer in rows of 4 tokens"):
        source.prepare(0)
