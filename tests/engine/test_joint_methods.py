"""Joint decoding by name: what searches accept, where outputs end, and their statistics."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import engine_of, full_logits, greedy, ragged_prompts, tiny, token_ids

from outrider import Engine, Result, Sampling
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters.search.beam_search import beam_search
from outrider.methods import METHODS

TARGET = tiny("llama", 0, dtype=torch.float64, std=0.2)
DRAFT = tiny("llama", 3, dtype=torch.float64, std=0.2)
PROMPTS = ragged_prompts([5, 1, 9, 3])
SAMPLING = Sampling(
    temperature=0.9, top_k=40, repetition_penalty=1.2, max_new_tokens=16, ignore_eos=True
)
WITH_DRAFT, ALONE = ("mjsd", "mtad"), ("mjgd", "beam-search")


def by_beams(γ: int = 4, model: Any = TARGET, **options: Any) -> Engine:
    return engine_of(model, None, "beam-search", γ, options={"num_beams": 3, **options})


@pytest.mark.parametrize("method", WITH_DRAFT)
def test_a_draft_by_the_target_itself_is_fully_accepted(method: str) -> None:
    """Every round but the last emits γ tokens and one more.

    MTAD compares all beams with the likeliest beam of their depth, so with a threshold below 1 that
    beam is accepted.
    """
    engine = engine_of(TARGET, TARGET, method, 3, options={"tau": 0.99})
    results = engine.generate(PROMPTS, SAMPLING)
    assert all(result.stats.acceptance_length == 4 for result in results)


@pytest.mark.parametrize("method", WITH_DRAFT)
def test_with_a_threshold_of_one_nothing_is_accepted(method: str) -> None:
    results = engine_of(TARGET, DRAFT, method, 3, options={"tau": 1}).generate(PROMPTS, SAMPLING)
    assert results.stats.accepted == 0
    assert results.stats.rounds == results.stats.emitted == 4 * 16


@pytest.mark.parametrize(
    "options", [{"distributions": "raw"}, {"quantity": "step", "search": "copies"}]
)
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_options_of_the_joint_rule(options: dict[str, object], temperature: float) -> None:
    """A row has the same output alone and in its batch; some drafts are accepted, some rejected."""
    sampling = Sampling(temperature=temperature, top_k=30, max_new_tokens=16, ignore_eos=True)
    engines = [
        engine_of(TARGET, DRAFT, "mjsd", 3, options=options | {"tau": 0.3}, max_batch_size=size)
        for size in (4, 1)
    ]
    together, alone = (engine.generate(PROMPTS, sampling) for engine in engines)
    assert token_ids(together) == token_ids(alone)
    assert 0 < together.stats.accepted < together.stats.drafted


def test_raw_distributions_at_temperature_zero_keep_more_than_the_argmax() -> None:
    """They accept tokens other than the argmax, also beside sampled rows."""
    raw = engine_of(TARGET, DRAFT, "mjsd", 3, options={"distributions": "raw"})
    warped = engine_of(TARGET, DRAFT, "mjsd", 3)
    found = raw.generate(PROMPTS, greedy(16))
    assert found.stats.accepted > warped.generate(PROMPTS, greedy(16)).stats.accepted
    mixed = raw.generate(PROMPTS, [greedy(16), SAMPLING, greedy(16), SAMPLING])
    assert token_ids(mixed)[::2] == token_ids(found)[::2]


@pytest.mark.parametrize("method", [*WITH_DRAFT, *ALONE])
def test_statistics_match_the_finished_output(method: str) -> None:
    """Log-probabilities equal those of a full forward pass, and acceptance matches the origins."""
    sampling = greedy(16, logprobs=2) if method in ALONE else SAMPLING
    sampling = replace(sampling, logprobs=2)
    for result in engine_of(TARGET, DRAFT, method, 3).generate(PROMPTS, sampling):
        text = [*result.prompt_ids, *result.token_ids]
        own_TV = full_logits(TARGET.module, text).log_softmax(-1)[len(result.prompt_ids) - 1 : -1]
        own_T = own_TV.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        assert list(result.logprobs) == pytest.approx(own_T.tolist(), abs=1e-6)
        tops = [top.token_ids for top in result.top_logprobs]
        assert tops == [tuple(ids) for ids in own_TV.topk(2).indices.tolist()]
        assert result.stats.accepted == result.origins.count("accepted")
        assert result.stats.emitted == len(result.origins) == 16


@pytest.mark.parametrize("method", [*WITH_DRAFT, *ALONE])
def test_an_output_ends_at_a_stop_token_inside_a_round(method: str) -> None:
    settings = greedy(16) if method in ALONE else SAMPLING
    engine = engine_of(TARGET, DRAFT, method, 4)
    (whole,) = token_ids(engine.generate(PROMPTS[:1], settings))
    (cut,) = engine.generate(PROMPTS[:1], replace(settings, stop=(whole[6],)))
    assert cut.finish_reason == "stop"
    assert cut.token_ids[-1] == whole[6]
    if method != "beam-search":  # in a beam search, an end token changes the result
        assert cut.token_ids == whole[: whole.index(whole[6]) + 1]


def best_text(prompt: list[int], num: int, ends: tuple[int, ...] = (), **settings: Any) -> tuple:
    """The output of ``beam_search``, which equals that of transformers (test_beam_search.py)."""
    return beam_search(TARGET, prompt, 3, num, eos_ids=ends, **settings)[0].token_ids


@pytest.mark.parametrize("γ", [1, 4, 31])
def test_beam_search_through_the_engine_equals_one_search(γ: int) -> None:
    """Whatever the number of tokens per round; rows come and go in a batch of two."""
    engine = engine_of(TARGET, None, "beam-search", γ, options={"num_beams": 3}, max_batch_size=2)
    results = engine.generate(PROMPTS, [greedy(14 - 3 * b) for b in range(4)])
    expected = [best_text(prompt, 14 - 3 * b) for b, prompt in enumerate(PROMPTS)]
    assert token_ids(results) == expected
    assert [len(text) for text in expected] == [14, 11, 8, 5]


def test_beam_search_has_the_options_of_transformers() -> None:
    """Each option changes the result on some prompt, with two end tokens."""
    prompts = ragged_prompts([5] * 6, seed=2)
    ends = best_text(prompts[0], 8)[2], best_text(prompts[1], 8)[3]
    sampling = Sampling(temperature=0, max_new_tokens=12, stop=ends)
    defaults = token_ids(by_beams().generate(prompts, sampling))
    assert defaults == [best_text(prompt, 12, ends) for prompt in prompts]
    for options in (
        {"length_penalty": -1.5},
        {"length_penalty": 3.0, "early_stopping": "never"},
        {"early_stopping": True},
    ):
        found = token_ids(by_beams(**options).generate(prompts, sampling))
        assert found == [best_text(prompt, 12, ends, **options) for prompt in prompts]
        assert found != defaults or options == {"early_stopping": True}


def test_beam_search_ends_at_the_end_of_sequence_token() -> None:
    """Unless the row ignores it."""
    (prompt,) = ragged_prompts([5], seed=2)
    end = best_text(prompt, 8)[2]
    model = tiny("llama", 0, dtype=torch.float64, std=0.2, eos_token_id=end)
    model.module.generation_config.eos_token_id = end
    engine = by_beams(model=model)
    (ended,) = engine.generate([prompt], Sampling(temperature=0, max_new_tokens=8))
    assert ended.token_ids == best_text(prompt, 8, (end,))
    (ignored,) = engine.generate([prompt], greedy(8))
    assert ignored.token_ids == best_text(prompt, 8)


def test_beam_search_applies_penalties_as_transformers_does() -> None:
    sampling = greedy(12, repetition_penalty=1.4, logit_bias={3: 2.0})
    found = token_ids(by_beams().generate(PROMPTS, sampling))
    assert found == [best_text(prompt, 12, sampling=sampling) for prompt in PROMPTS]
    assert found != token_ids(by_beams().generate(PROMPTS, greedy(12)))


def test_beam_search_fills_the_context() -> None:
    (prompt,) = ragged_prompts([TARGET.limit - 7])
    (found,) = by_beams().generate([prompt], greedy(50))
    assert found.token_ids == best_text(prompt, 7)
    assert found.finish_reason == "context"


@pytest.mark.parametrize("method", ALONE)
def test_the_targets_own_searches_are_for_temperature_zero(method: str) -> None:
    assert METHODS[method].needs == "nothing"
    with pytest.raises(IncompatibleError, match=f"'{method}' is defined at temperature 0 only"):
        engine_of(TARGET, None, method).generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("mjsd", {"beams": 0}, "beams=0: must be a whole number, 1 or more"),
        ("mjsd", {"tau": -0.5}, "tau=-0.5: must be finite and at least 0"),
        ("mjsd", {"search": "best"}, "search='best': must be one of sample, greedy, copies"),
        ("mjsd", {"quantity": "last"}, "quantity='last': must be one of joint, step"),
        ("mjsd", {"distributions": "own"}, "distributions='own': must be one of warped, raw"),
        ("mtad", {"tau": float("nan")}, "tau=nan"),
        ("mtad", {"search": "copies"}, "search='copies': must be one of sample, greedy"),
        ("mtad", {"beams": 64}, "beams=64: 4 steps .* take 63 beams or fewer"),
        ("mjgd", {"beams": 0}, "beams=0"),
        ("beam-search", {"num_beams": 0}, "num_beams=0: must be a whole number from 1"),
        ("beam-search", {"length_penalty": "inf"}, "length_penalty=inf: must be finite"),
        ("beam-search", {"early_stopping": "soon"}, "early_stopping='soon': .* true, false or nev"),
    ],
)
def test_bad_options_are_named(method: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        engine_of(TARGET, DRAFT, method, 4, options=options)


def test_a_verifier_that_needs_logits_rejects_drafts_without_them() -> None:
    from outrider.verifiers import Joint

    engine = engine_of(TARGET, DRAFT, "mjsd", 3, verifier=Joint(distributions="raw"))
    with pytest.raises(
        IncompatibleError, match="distributions='raw': the drafter provides no logits"
    ):
        engine.generate(PROMPTS, SAMPLING)


def test_with_top_k_1_every_method_gives_the_argmax() -> None:
    """At any temperature."""
    only = Sampling(top_k=1, max_new_tokens=12, ignore_eos=True)
    plain: list[Result] = engine_of(TARGET).generate(PROMPTS, greedy(12))
    for method in WITH_DRAFT:
        assert token_ids(engine_of(TARGET, DRAFT, method).generate(PROMPTS, only)) == token_ids(
            plain
        )
