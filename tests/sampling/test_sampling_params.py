"""Sampling: every parameter's domain."""

import math
from dataclasses import FrozenInstanceError

import pytest

from outrider.core.errors import InvalidParameterError, OutriderError
from outrider.sampling import Grammar, Sampling

NAN, INF = math.nan, math.inf
WRONG = {
    "temperature": [-0.1, NAN, INF, "1", True],
    "top_k": [-1, 2.0, True],
    "top_p": [0, -0.5, 1.01, NAN],
    "min_p": [-0.01, 1.01, NAN],
    "repetition_penalty": [0, -1, NAN, INF],
    "presence_penalty": [NAN, INF, None],
    "frequency_penalty": [NAN, -INF, None],
    "logit_bias": [{-1: 0.0}, {0: NAN}, {0: INF}, {1.5: 1.0}],
    "forced": [{-1: 0}, {0: -1}, {0.5: 1}, {0: 1.5}, {0: None}],
    "seed": [0.5, "1", True],
    "max_new_tokens": [0, -1, 1.5, None],
    "stop": [[""], [-1], [1.5], ["a", None]],
    "logprobs": [-1, 1.5, True],
    "processors": [[3]],
    "stateless": [0, "no"],
    "grammar": ["{}", {"type": "object"}],
    "top_p_convention": ["HF", None],
}
RIGHT = {
    "temperature": [None, 0, 0.0, 1e-3, 100, 1],
    "top_k": [None, 0, 1, 10**9],
    "top_p": [None, 1e-9, 0.5, 1, 1.0],
    "min_p": [None, 0, 0.5, 1],
    "repetition_penalty": [None, 0.5, 1, 2.0],
    "presence_penalty": [-2, 0, 2.5],
    "frequency_penalty": [-2, 0, 2.5],
    "logit_bias": [{}, {3: -INF, 0: 5}],
    "forced": [{}, {0: 5, 9: 0}],
    "seed": [-1, 0, 2**64, None],
    "max_new_tokens": [1, 10**6],
    "stop": [(), "end", 0, ["end", 7]],
    "logprobs": [None, 0, 20],
    "processors": [(), [lambda ids, scores: scores]],
    "stateless": [None, True, False],
    "grammar": [None, Grammar.json_object()],
    "top_p_convention": ["hf", "paper"],
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(WRONG))
def test_a_value_outside_its_domain_is_one_line_naming_the_parameter(name, value):
    with pytest.raises(InvalidParameterError) as caught:
        Sampling(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OutriderError)


@pytest.mark.parametrize(("name", "value"), cases(RIGHT))
def test_a_value_inside_its_domain_is_taken(name, value):
    Sampling(**{name: value})


def test_every_parameter_is_in_the_tables():
    names = set(Sampling.__dataclass_fields__) - {"ignore_eos"}
    assert names == WRONG.keys() == RIGHT.keys()


def test_it_is_immutable():
    with pytest.raises(FrozenInstanceError):
        Sampling().temperature = 2.0


def test_it_copies_collections_of_the_caller():
    bias, stop = {1: 2.0}, ["a"]
    sampling = Sampling(logit_bias=bias, stop=stop)
    bias[1] = 3.0
    stop.append("b")
    assert sampling.logit_bias == {1: 2.0}
    assert sampling.stop == ("a",)


def test_stop_strings_and_stop_token_ids_are_separated():
    sampling = Sampling(stop=["end", 7, "fin", 9])
    assert sampling.stop_strings == ("end", "fin")
    assert sampling.stop_token_ids == {7, 9}
    assert Sampling(stop="end").stop_strings == ("end",)
    assert Sampling(stop=7).stop_token_ids == {7}


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalises(name):
    assert Sampling(**{name: 1.5}).penalises
    assert not Sampling().penalises


def test_greedy_is_temperature_zero():
    assert Sampling(temperature=0).greedy
    assert not Sampling(temperature=1e-6).greedy
