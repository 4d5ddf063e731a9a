"""``return_rounds`` and ``return_pieces``: what a response says of its rounds and tokens."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from tiny_servers import tiny_engine

from outrider.engine import Engine

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODY: dict[str, Any] = {
    "prompt": "hello", "max_tokens": 40, "ignore_eos": True, "seed": 3, "temperature": 1.0,
    "return_rounds": True, "return_pieces": True, "return_token_ids": True,
    "return_token_origins": True, "speculation_metrics": "detailed",
}  # fmt: skip
METHODS = [
    {},
    {"method": "suffix"},
    {"method": "suffix", "method_options": {"shape": "tree"}},
    {"method": "block"},
    {"method": "sample-match"},
    {"method": "mentored", "divergence_budget": 0.3},
    {"num_speculative_tokens": 0},
]


def tokens_of(round_: dict[str, Any]) -> tuple[list[int], list[str]]:
    """The tokens that a round emitted, and their origins."""
    accepted = [each for each in round_["drafted"] if each["outcome"] == "accepted"]
    tokens, origins = [each["token_id"] for each in accepted], ["accepted"] * len(accepted)
    if round_["next"] is not None:
        tokens.append(round_["next"]["token_id"])
        origins.append(round_["next"]["origin"])
    return tokens, origins


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fields", METHODS, ids=str)
def test_rounds_add_up_to_the_output(
    client: TestClient, fields: dict[str, Any], temperature: float
) -> None:
    body = BODY | fields | {"temperature": temperature}
    answer = client.post(COMPLETIONS, json=body).json()
    (choice,) = answer["choices"]
    emitted = [tokens_of(round_) for round_ in choice["rounds"]]
    assert [token for tokens, _ in emitted for token in tokens] == choice["token_ids"]
    assert [each for _, origins in emitted for each in origins] == choice["token_origins"]
    told = answer["metrics"]["speculative_decoding"]
    drafted = [len(round_["drafted"]) for round_ in choice["rounds"] if round_["drafted"]]
    assert drafted == told["per_step_drafted"]
    for token in (each for round_ in choice["rounds"] for each in round_["drafted"]):
        assert 0 <= token["p"] <= 1
        assert token["q"] is None or 0 < token["q"] <= 1.000001
        assert token["acceptance"] is None or 0 <= token["acceptance"] <= 1.000001
        if token["outcome"] == "accepted":
            assert token["acceptance"] != 0
        if token["outcome"] == "rejected":
            assert token["acceptance"] is None or token["acceptance"] < 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_p_q_and_acceptance_are_those_of_the_models(
    client_of: Callable[..., TestClient], temperature: float
) -> None:
    """Of every drafted token, from separate forward passes of both models."""
    engine = tiny_engine()
    body = BODY | {"temperature": temperature, "prompt": list(engine.encode("hello"))}
    (choice,) = client_of(engine).post(COMPLETIONS, json=body).json()["choices"]
    sequence, num_compared = body["prompt"], 0
    for round_ in choice["rounds"]:
        path = list(sequence)
        for token in round_["drafted"]:
            raw, p = _distribution(engine, "target", path, temperature)
            assert token["p"] == pytest.approx(p[token["token_id"]].item(), abs=1e-4)
            assert token["logprob"] == pytest.approx(raw[token["token_id"]].item(), abs=1e-3)
            if temperature:
                _, q = _distribution(engine, "draft", path, temperature)
                assert token["q"] == pytest.approx(q[token["token_id"]].item(), abs=1e-4)
                assert token["acceptance"] == pytest.approx(
                    min(1.0, token["p"] / token["q"]), abs=1e-4
                )
            else:
                assert token["acceptance"] == token["p"]
            path.append(token["token_id"])
            num_compared += 1
        sequence = sequence + tokens_of(round_)[0]
        if round_["next"] is not None:
            raw, p = _distribution(engine, "target", sequence[:-1], temperature)
            assert round_["next"]["p"] == pytest.approx(p[sequence[-1]].item(), abs=1e-4)
            assert round_["next"]["logprob"] == pytest.approx(raw[sequence[-1]].item(), abs=1e-3)
    assert num_compared > 20


@torch.inference_mode()
def _distribution(
    engine: Engine, role: str, ids: list[int], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's log-probabilities behind some tokens, and its distribution at a temperature."""
    logits = getattr(engine, role).module(torch.tensor([ids])).logits[0, -1].float()
    if temperature == 0:
        point = torch.zeros_like(logits)
        point[logits.argmax()] = 1
        return logits.log_softmax(-1), point
    return logits.log_softmax(-1), (logits / temperature).softmax(-1)


def test_pieces_are_the_text(client: TestClient) -> None:
    (choice,) = client.post(COMPLETIONS, json=BODY).json()["choices"]
    assert "".join(piece["text"] for piece in choice["pieces"]) == choice["text"]
    assert {piece["origin"] for piece in choice["pieces"]} <= set(choice["token_origins"])


def test_a_stop_string_cuts_the_pieces(client: TestClient) -> None:
    (whole,) = client.post(COMPLETIONS, json=BODY).json()["choices"]
    stop = whole["text"][12:14]
    (choice,) = client.post(COMPLETIONS, json=BODY | {"stop": stop}).json()["choices"]
    assert stop not in choice["text"]
    assert "".join(piece["text"] for piece in choice["pieces"]) == choice["text"]
    emitted = [token for round_ in choice["rounds"] for token in tokens_of(round_)[0]]
    assert emitted == choice["token_ids"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_stream_says_the_same(client: TestClient, path: str) -> None:
    body = {name: value for name, value in BODY.items() if name != "prompt"}
    is_chat = path == CHATS
    body |= {"messages": [{"role": "user", "content": "hello"}]} if is_chat else {"prompt": "hello"}
    (whole,) = client.post(path, json=body).json()["choices"]
    streamed: dict[str, list[Any]] = {"rounds": [], "pieces": []}
    for line in client.post(path, json=body | {"stream": True}).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for name, parts in streamed.items():
                    parts += choice.get(name, [])
    assert streamed == {"rounds": whole["rounds"], "pieces": whole["pieces"]}


def test_responses_have_them(client: TestClient) -> None:
    body = {"input": "hello", "max_output_tokens": 8, "return_rounds": True, "return_pieces": True}
    (item,) = client.post(RESPONSES, json=body).json()["output"]
    assert item["rounds"]
    assert "".join(piece["text"] for piece in item["pieces"]) == item["content"][0]["text"]


def test_rounds_of_rows_that_share_a_batch(client: TestClient) -> None:
    """Each output has its own, equal to those of the same request alone."""
    prompts = ["hello", "a longer prompt", "x"]
    together = client.post(COMPLETIONS, json=BODY | {"prompt": prompts}).json()["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        (alone,) = client.post(COMPLETIONS, json=BODY | {"prompt": prompt}).json()["choices"]
        assert [tokens_of(each) for each in choice["rounds"]] == [
            tokens_of(each) for each in alone["rounds"]
        ]


def test_nothing_observes_once_the_request_is_over(client_of: Callable[..., TestClient]) -> None:
    engine = tiny_engine()
    client = client_of(engine)
    (with_rounds,) = client.post(COMPLETIONS, json=BODY).json()["choices"]
    assert engine.observed.observer is None
    (without,) = client.post(COMPLETIONS, json=BODY | {"return_rounds": False}).json()["choices"]
    assert "rounds" not in without
    assert without["token_ids"] == with_rounds["token_ids"]


def test_another_observer_is_left_alone(client_of: Callable[..., TestClient]) -> None:
    engine = tiny_engine()
    other: Any = object()
    engine.observed.observer = other
    answer = client_of(engine).post(COMPLETIONS, json=BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "return_rounds"
    assert engine.observed.observer is other


def test_methods_are_those_that_requests_may_choose(
    client_of: Callable[..., TestClient],
) -> None:
    client = client_of()
    told = client.get("/methods").json()
    names = [each["id"] for each in told["data"]]
    assert told["default"] == "speculative"
    assert (told["num_speculative_tokens"], told["governed"]) == (4, False)
    governed = client_of(tiny_engine(γ="auto")).get("/methods").json()
    assert governed["governed"]
    assert {"plain", "suffix", "mentored"} <= set(names)
    assert not {"ngram", "eagle3"} & set(names)
    budgeted = {each["id"]: each["has_budget"] for each in told["data"]}
    assert budgeted["mentored"]
    assert not budgeted["plain"]
    lossless = {each["id"]: each["lossless"] for each in told["data"]}
    assert lossless["speculative"]
    assert not lossless["mentored"]


def test_a_server_of_one_method_lists_it_alone(client_of: Callable[..., TestClient]) -> None:
    told = client_of(max_methods=1).get("/methods").json()
    assert [each["id"] for each in told["data"]] == ["speculative"]
