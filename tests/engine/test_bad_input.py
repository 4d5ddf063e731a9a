"""Bad input raises a typed exception with a one-line message that names the remedy."""

from typing import Any

import pytest
import torch
from tiny_models import (
    VOCAB,
    byte_tokenizer,
    engine_of,
    full_logits,
    greedy,
    ragged_prompts,
    tiny,
    tiny_module,
    token_ids,
)

from outrider import Engine, OutriderError, Sampling
from outrider.core.errors import (
    IncompatibleError,
    InvalidParameterError,
    NonFiniteLogitsError,
    PromptError,
    UnknownMethodError,
)
from outrider.methods import METHODS, find_method
from outrider.runtime import HFModel

LIMIT = 64


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(tiny(max_position_embeddings=LIMIT))


def refusal(engine: Engine, prompts: Any, sampling: Any, error: type[OutriderError]) -> str:
    """The message of the error, which ``stream`` must raise too, before its first event."""
    with pytest.raises(error) as caught:
        engine.generate(prompts, sampling)
    if not isinstance(prompts, str) and len(prompts) == 1:
        with pytest.raises(error):
            engine.stream(prompts[0], sampling)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "the prompt is empty"),
        ([[1, 2], []], "the prompt is empty"),
        ([list(range(LIMIT))], f"has {LIMIT} tokens, the context {LIMIT}, .* shorten .* by 1$"),
        ([[1] * 100], f"has 100 tokens, the context {LIMIT}, .* by {100 - LIMIT + 1}$"),
        ([[1, VOCAB]], f"token id {VOCAB} is out of range: the vocabulary is 0 to {VOCAB - 1}"),
        ([[1, -1, 2]], "token id -1 is out of range"),
        (["text"], "no tokenizer"),
        ([1, 2, 3], r"write \[\[1, 2, 3\]\]"),
    ],
)
def test_prompts(engine: Engine, prompts: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        engine.generate(prompts, greedy(3))
    refusal(engine, prompts, greedy(3), PromptError)


def test_an_empty_prompt() -> None:
    tokenizer = byte_tokenizer()
    engine = engine_of(HFModel(tiny_module(vocab_size=len(tokenizer)), tokenizer))
    assert "empty" in refusal(engine, "", greedy(3), PromptError)


def test_no_prompts_at_all(engine: Engine) -> None:
    results = engine.generate([], greedy(3))
    assert list(results) == []
    assert results.stats.emitted == 0


def test_the_longest_prompt_that_fits(engine: Engine) -> None:
    result = engine.generate([[1] * (LIMIT - 1)], greedy(5))[0]
    assert (len(result.token_ids), result.finish_reason) == (1, "context")


def test_a_refused_prompt_stops_the_batch_before_it_starts(engine: Engine) -> None:
    with pytest.raises(PromptError):
        engine.generate([[1, 2], [VOCAB]], greedy(3))
    assert len(engine.generate([[1, 2]], greedy(3))) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("nan")},
        {"max_new_tokens": 0},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("inf")}},
        {"stop": ""},
        {"stop": [-1]},
        {"logprobs": -1},
        {"seed": 1.5},
    ],
)
def test_sampling_parameters(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        Sampling(**settings)
    assert next(iter(settings)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_bias", {VOCAB: 1.0}), ("stop", [1, VOCAB]), ("forced", {2: VOCAB})],
)
def test_tokens_outside_the_vocabulary(engine: Engine, name: str, value: Any) -> None:
    message = refusal(engine, [[1]], Sampling(**{name: value}), InvalidParameterError)
    assert message.startswith(f"{name}={VOCAB}: token id {VOCAB} is out of range")
    assert message.endswith(f"the vocabulary is 0 to {VOCAB - 1}")


def test_parameters_that_do_not_fit_the_model(engine: Engine) -> None:
    assert "tokenizer" in refusal(engine, [[1]], Sampling(stop="x"), InvalidParameterError)
    message = refusal(engine, [[1], [2], [3]], [Sampling()] * 2, InvalidParameterError)
    assert "2 sampling parameters for 3 prompts" in message


@pytest.mark.parametrize("number", [0, 65, -3, 1.0, True])
def test_invalid_numbers_for_the_engine(number: Any) -> None:
    target = tiny()
    with pytest.raises(InvalidParameterError, match=r"num_speculative_tokens=.* from 1 to 64"):
        Engine(target, None, METHODS["plain"], num_speculative_tokens=number)
    if number != 65:
        with pytest.raises(InvalidParameterError, match="max_batch_size="):
            Engine(target, None, METHODS["plain"], max_batch_size=number)


def test_unknown_methods_suggest_similar_names() -> None:
    for wrong, near in (("specualtive", "speculative"), ("gredy", "greedy"), ("Plain", "plain")):
        with pytest.raises(UnknownMethodError, match=f"did you mean '{near}'") as caught:
            find_method(wrong)
        assert "\n" not in str(caught.value)
    for wrong in ("zzz", "foo", "beam"):  # similar to none of the names: only the list
        with pytest.raises(
            UnknownMethodError, match=f"'{wrong}': known: plain, speculative, block, greedy"
        ):
            find_method(wrong)
    engine = engine_of(tiny(), tiny(seed=1), "greedy")
    message = refusal(engine, [[1]], Sampling(temperature=0.3), IncompatibleError)
    assert "'greedy'" in message


def test_methods_for_temperature_zero_say_so() -> None:
    greedy_only = [method for method in METHODS.values() if method.recipe().greedy_only]
    assert "bild" in [method.name for method in greedy_only]
    for method in greedy_only:
        assert "temperature 0 only" in method.summary


def damaged(seed: int, token: int, value: float, **settings: Any) -> HFModel:
    """A model that is broken after one token, which other tokens are unlikely to lead to."""
    module = tiny_module("llama", seed, **settings)
    with torch.no_grad():
        module.get_input_embeddings().weight[token] = value
    return HFModel(module)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("culprit", ["target", "draft"])
def test_non_finite_logits_name_model_and_position(
    culprit: str, temperature: float, value: float
) -> None:
    token = 7
    models = {"target": tiny(seed=0), "draft": tiny(seed=1)}
    models[culprit] = damaged(0 if culprit == "target" else 1, token, value)
    for name, model in models.items():
        model.name = name
    engine = engine_of(models["target"], models["draft"], γ=3)
    sampling = Sampling(
        temperature=temperature, max_new_tokens=9, ignore_eos=True, logit_bias={token: -1e4}
    )
    healthy = ragged_prompts([4, 6], seed=5)
    assert not any(token in prompt for prompt in healthy)
    before = engine.generate(healthy, sampling)
    for prompts in ([[1, 2, token]], [*healthy, [1, 2, token]]):
        with pytest.raises(NonFiniteLogitsError) as caught:
            engine.generate(prompts, sampling)
        message = str(caught.value)
        assert message.startswith(f"{culprit} produced NaN or infinite logits")
        assert "position 2;" in message
        assert "\n" not in message
    assert token_ids(engine.generate(healthy, sampling)) == token_ids(before)


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (torch.float16, "try dtype='bfloat16' or dtype='float32'$"),
        (torch.bfloat16, "try dtype='float32'$"),
        (torch.float32, "float32 is wide enough: check its files, or get them again$"),
        (torch.float64, "float64 is wide enough: check its files, or get them again$"),
    ],
)
def test_non_finite_logits_advise_a_wider_precision(dtype: torch.dtype, advice: str) -> None:
    engine = engine_of(damaged(0, 7, float("nan"), dtype=dtype))
    with pytest.raises(NonFiniteLogitsError, match=advice):
        engine.generate([[1, 2, 7]], greedy(2))


def test_non_finite_logits_in_the_middle_of_a_sequence() -> None:
    """The message names the position at which the round began."""
    target = tiny(seed=0, name="target")
    prompt = ragged_prompts([5])[0]
    text = engine_of(target).generate([prompt], greedy(12))[0].token_ids
    place = next(i for i in range(3, 12) if text[i] not in {*prompt, *text[:i]})
    broken = damaged(0, text[place], float("nan"))
    broken.name = "target"
    with pytest.raises(NonFiniteLogitsError, match=f"target .* position {5 + place};"):
        engine_of(broken).generate([prompt], greedy(12))


def test_a_token_with_bias_minus_infinity_is_no_error() -> None:
    """An infinite bias is requested by the user and is no sign of a damaged model."""
    target = tiny()
    best = int(full_logits(target.module, [1, 2]).argmax(-1)[-1])
    banned = greedy(4, logit_bias={best: float("-inf")})
    for draft in (None, tiny(seed=1)):
        result = engine_of(target, draft).generate([[1, 2]], banned)[0]
        assert best not in result.token_ids
