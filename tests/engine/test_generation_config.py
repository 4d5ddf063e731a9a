"""The target's generation config applies as in ``generate``, unless it is turned off."""

from typing import Any

import pytest
from tiny_models import engine_of, hf_generate, ragged_prompts, tiny_module, token_ids
from transformers import GenerationConfig, PreTrainedModel

from outrider import Engine, Result, Sampling
from outrider.core.errors import InvalidParameterError, UnsupportedModelError
from outrider.runtime import HFModel

NUM = 14
PROMPTS = ragged_prompts([1, 6, 11])
GREEDY = Sampling(temperature=0, max_new_tokens=NUM)
ENDS = list(range(40))
RULES = {
    "repetition": {"repetition_penalty": 1.8},
    "suppressed": {"suppress_tokens": list(range(60))},
    "suppressed at the beginning": {"begin_suppress_tokens": list(range(60))},
    "n-grams": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[token] for token in range(50)] + [[60, 61]]},
    "length": {"min_length": 12, "eos_token_id": ENDS},
    "new tokens": {"min_new_tokens": 7, "eos_token_id": ENDS},
    "first token": {"forced_bos_token_id": 9, "begin_suppress_tokens": list(range(60))},
    "last token": {"forced_eos_token_id": 7},
    "bias": {"sequence_bias": [[[token], -3.0] for token in range(50)]},
    "prompt": {"encoder_repetition_penalty": 3.0, "encoder_no_repeat_ngram_size": 1},
    "decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": ENDS[:8]},
}


def module_with(**settings: Any) -> PreTrainedModel:
    module = tiny_module(std=0.25)
    for field, value in settings.items():
        setattr(module.generation_config, field, value)
    return module


def engine_with(draft: bool = False, obey: bool = True, **settings: Any) -> Engine:
    target = HFModel(module_with(**settings), name="target")
    model = HFModel(tiny_module(std=0.24)) if draft else None
    return engine_of(target, model, generation_config=obey)


def expected(module: PreTrainedModel) -> list[tuple[int, ...]]:
    return [hf_generate(module, prompt, NUM) for prompt in PROMPTS]


@pytest.mark.parametrize("rule", RULES)
def test_its_rules_apply_as_in_generate(rule: str) -> None:
    module = module_with(**RULES[rule])
    wanted = expected(module)
    for draft in (False, True):
        engine = engine_with(draft, **RULES[rule])
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == wanted
        assert engine.obeyed.keys() == RULES[rule].keys() - {"eos_token_id"}


@pytest.mark.parametrize("rule", ["repetition", "suppressed", "n-grams"])
def test_it_can_be_ignored(rule: str) -> None:
    bare = expected(module_with())
    assert expected(module_with(**RULES[rule])) != bare
    engine = engine_with(True, obey=False, **RULES[rule])
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == bare
    assert engine.obeyed == {}


def sampled(engine: Engine, **settings: Any) -> list[Result]:
    return engine.generate(PROMPTS, Sampling(max_new_tokens=NUM, **settings))


def test_unset_parameters_come_from_it_and_given_ones_override_it() -> None:
    theirs = {"temperature": 0.6, "top_k": 7, "top_p": 0.8, "min_p": 0.05}
    config = theirs | {"do_sample": True, "repetition_penalty": 1.3}
    obedient, bare = engine_with(True, **config), engine_with(True)
    mine = {**theirs, "repetition_penalty": 1.3}
    assert token_ids(sampled(obedient)) == token_ids(sampled(bare, **mine))
    ours = mine | {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    given = {name: ours[name] for name in ("temperature", "top_k", "repetition_penalty")}
    assert token_ids(sampled(obedient, **given)) == token_ids(sampled(bare, **ours))
    assert obedient.settled(Sampling(top_k=3)) == Sampling(**{**mine, "top_k": 3})
    assert obedient.obeyed == mine
    free = engine_with(True, obey=False, **config)
    assert token_ids(sampled(free)) == token_ids(sampled(bare))


def test_our_own_defaults_come_last() -> None:
    settled = engine_with().settled(Sampling())
    assert settled == Sampling(1.0, 0, 1.0, 0.0, 1.0)
    assert token_ids(sampled(engine_with())) == token_ids(sampled(engine_with(), temperature=1))


def test_a_config_without_sampling_is_greedy_unless_it_is_the_default() -> None:
    written = {"do_sample": False, "temperature": 0.6, "_from_model_config": False}
    assert engine_with(**written).settled(Sampling()).greedy
    assert not engine_with(**written).settled(Sampling(temperature=0.5)).greedy
    derived = engine_with(do_sample=False, _from_model_config=True)
    assert derived.settled(Sampling()).temperature == 1.0
    assert derived.obeyed == {}


def test_unsupported_settings_raise_an_error() -> None:
    for settings in ({"guidance_scale": 3.0}, {"do_sample": True, "typical_p": 0.5}):
        name = next(field for field in settings if field != "do_sample")
        with pytest.raises(UnsupportedModelError, match=f"target sets {name}="):
            engine_with(**settings)
        engine_with(obey=False, **settings)
    with pytest.raises(InvalidParameterError, match=r"generation config of target has top_p=1\.5"):
        engine_with(top_p=1.5).generate([PROMPTS[0]])


def test_a_model_without_a_generation_config() -> None:
    module = module_with()
    module.generation_config = None
    target = HFModel(module)
    assert token_ids(engine_of(target).generate(PROMPTS, GREEDY)) == expected(module_with())


def test_sampling_parameters_compare_by_their_given_values() -> None:
    assert Sampling() == Sampling()
    assert Sampling() != Sampling(temperature=1.0), "the generation config may say otherwise"
    assert Sampling().with_defaults() == Sampling(temperature=1.0).with_defaults()
    assert GenerationConfig().do_sample is None, "nothing said is not a no"
