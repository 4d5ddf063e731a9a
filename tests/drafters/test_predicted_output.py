"""Predicted outputs: drafts follow the expected output, leave it and find back to it."""

from random import Random

import pytest
from tiny_models import engine_of, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.core.errors import InvalidParameterError
from outrider.drafters.lookup.predicted import PredictedOutput, PredictionReader
from outrider.engine import Request, Row
from outrider.methods.copying import PREDICTED
from outrider.testing import check_drafter

TARGET = tiny(std=0.2)
PROMPTS = ragged_prompts([5, 9, 3])


def test_a_draft_begins_where_the_output_begins() -> None:
    reader = PredictionReader([7, 8, 9], begin=2)
    reader.extend([1, 8])
    assert reader.continuation(2) == (7, 8)
    reader.extend([7])
    assert reader.continuation(5) == (8, 9)


def test_nothing_is_drafted_outside_the_reference() -> None:
    reader = PredictionReader([7, 8, 9], begin=0)
    reader.extend([5])
    assert reader.continuation(5) == ()
    reader.extend([8])
    assert reader.continuation(5) == (9,)


def test_the_longest_match_wins_then_the_nearest() -> None:
    reference = [1, 2, 3, 4, 2, 3, 5, 3, 6]
    reader = PredictionReader(reference, begin=0)
    reader.extend([9, 4, 2, 3])  # 4 2 3 occurs once
    assert reader.continuation(1) == (5,)
    reader = PredictionReader(reference, begin=0)
    reader.extend([9, 3])  # of three equal matches the one behind position 0 nearest to it
    assert reader.continuation(1) == (4,)


def test_forgotten_tokens_leave_no_trace() -> None:
    """Property: whatever is read and forgotten, the draft is that of a reader of what is left."""
    random = Random(0)
    reference = [random.randrange(4) for _ in range(40)]
    for _ in range(50):
        begin = random.randrange(4)
        reader, text = PredictionReader(reference, begin), list[int]()
        for _ in range(20):
            piece = [random.randrange(4) for _ in range(random.randint(0, 5))]
            reader.extend(piece)
            num = random.randint(0, len(text) + len(piece))
            reader.forget(num)
            text = (text + piece)[: len(text) + len(piece) - num]
            fresh = PredictionReader(reference, begin)
            fresh.extend(text)
            assert reader.continuation(5) == fresh.continuation(5)


def test_contract() -> None:
    check_drafter(PredictedOutput(), 4, prompts=[(0, 1, 2), (1,)])


def run(requests: list[Request], engine: object) -> list[Row]:
    scheduler = engine.new_scheduler()  # type: ignore[attr-defined]
    ids = [scheduler.add(request) for request in requests]
    rows: dict[int, Row] = {}
    while len(rows) < len(ids):
        rows |= {each.request_id: each.row for each in scheduler.step() if each.row.over}
    return [rows[i] for i in ids]


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_output_is_that_of_plain_decoding_whatever_is_expected(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, max_new_tokens=24, seed=3)
    expected = token_ids(engine_of(TARGET).generate(PROMPTS, sampling))
    engine = engine_of(TARGET, method=PREDICTED, γ=6)
    wrong = [4] * 10
    edited = [*expected[1][:9], 0, *expected[1][10:]]
    predictions = [list(expected[0]), edited, wrong]
    requests = [
        engine.request(prompt, sampling, prediction=prediction)
        for prompt, prediction in zip(PROMPTS, predictions, strict=True)
    ]
    rows = run(requests, engine)
    assert [tuple(row.token_ids) for row in rows] == expected
    assert rows[0].stats.accepted == rows[0].stats.drafted > 0
    assert rows[0].stats.rounds == 4  # 24 tokens, seven a round
    assert 15 <= rows[1].stats.accepted < rows[1].stats.drafted


def test_without_a_prediction_nothing_is_drafted() -> None:
    engine = engine_of(TARGET, method=PREDICTED)
    assert engine.generate([PROMPTS[0]], Sampling(max_new_tokens=8))[0].stats.drafted == 0


def test_requests_of_one_batch_have_draft_lengths_of_their_own() -> None:
    engine = engine_of(TARGET, tiny(std=0.19), γ=4)
    sampling = Sampling(temperature=0, max_new_tokens=20, ignore_eos=True)
    lengths = [0, 2, None]
    requests = [
        engine.request(prompt, sampling, num_speculative_tokens=γ)
        for prompt, γ in zip(PROMPTS, lengths, strict=True)
    ]
    off, short, full = run(requests, engine)
    assert set(off.origins) == {"plain"}
    assert off.stats.drafted == 0
    assert len(short.stats.tried_at) == 2
    assert len(full.stats.tried_at) == 4
    expected = token_ids(engine_of(TARGET).generate(PROMPTS, sampling))
    assert [tuple(row.token_ids) for row in (off, short, full)] == expected


@pytest.mark.parametrize("γ", [-1, 5, 1.5, "2"])
def test_a_draft_length_beyond_the_engines_is_an_error(γ: object) -> None:
    with pytest.raises(InvalidParameterError, match=r"num_speculative_tokens=.* from 0 .* to 4"):
        engine_of(TARGET).request(PROMPTS[0], num_speculative_tokens=γ)  # type: ignore[arg-type]
