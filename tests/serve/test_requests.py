"""What requests may say, and what is refused: OpenAI's error format, the parameter named."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tiny_models import engine_of, tiny
from tiny_servers import tiny_engine

from outrider import Sampling

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
TEXT = {"prompt": "hello"}
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETIONS, {}, "prompt", "missing"),
        (COMPLETIONS, {"prompt": []}, "prompt", "must be a string"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt", "strings and token ids in one list"),
        (COMPLETIONS, {"prompt": [1, 999]}, "prompt", "token id 999 is out of range"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt", "surrogate"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [5] * 200}, "prompt", "200 tokens, the context 128"),
        (COMPLETIONS, TEXT | CHAT, "messages", "no such field"),
        (CHATS, TEXT | CHAT, "prompt", "no such field"),
        (COMPLETIONS, TEXT | {"max_tokens": "3"}, "max_tokens", "valid integer"),
        (COMPLETIONS, TEXT | {"max_tokens": 0}, "max_tokens", "at least 1"),
        (COMPLETIONS, TEXT | {"temperature": -1}, "temperature", "must be 0"),
        (COMPLETIONS, TEXT | {"n": 0}, "n", "greater than or equal to 1"),
        (COMPLETIONS, TEXT | {"stop": [""]}, "stop", "non-empty"),
        (COMPLETIONS, TEXT | {"stop": 5}, "stop", "stop: must be a string or a list of strings"),
        (COMPLETIONS, TEXT | {"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        (COMPLETIONS, TEXT | {"logit_bias": {"900": 1}}, "logit_bias", "out of range"),
        (COMPLETIONS, TEXT | {"logit_bias": {"9": 101}}, "logit_bias", "less than or equal"),
        (COMPLETIONS, TEXT | {"stream_options": {}}, "stream_options", "only for stream"),
        (COMPLETIONS, TEXT | {"min_tokens": 3}, "min_tokens", "not supported"),
        (COMPLETIONS, TEXT | {"best_of": 2}, "best_of", "only 1 is"),
        (COMPLETIONS, TEXT | {"method": "best"}, "method", "unknown method"),
        (COMPLETIONS, TEXT | {"method": "ngram"}, "method", "operator"),
        (COMPLETIONS, TEXT | {"method": "eagle3"}, "method", "the server has none"),
        (
            COMPLETIONS,
            TEXT | {"method_options": {"nothing": 1}},
            "method_options",
            "has no (such )?option",
        ),
        (
            COMPLETIONS,
            TEXT | {"method": "plain", "divergence_budget": 0.1},
            "divergence_budget",
            "mentored",
        ),
        (
            COMPLETIONS,
            TEXT | {"num_speculative_tokens": 9},
            "num_speculative_tokens",
            "from 0 .* to 4",
        ),
        (CHATS, {"messages": []}, "messages", "at least 1"),
        (CHATS, {"messages": [{"role": "nobody", "content": "x"}]}, "messages", "role"),
        (CHATS, {"messages": [{"role": "user", "content": 5}]}, "messages", "must be a string"),
        (
            CHATS,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "text only",
        ),
        (CHATS, CHAT | {"tools": [{}]}, "tools", r"tools\[0\].type: the field is missing"),
        (CHATS, CHAT | {"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
        (CHATS, CHAT | {"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        (
            CHATS,
            CHAT
            | {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nothing"}},
                }
            },
            "response_format",
            "nothing",
        ),
        (
            COMPLETIONS,
            TEXT | {"structured_outputs": {"regex": "(a"}},
            "structured_outputs",
            "unclosed group",
        ),
        (
            COMPLETIONS,
            TEXT | {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "one of json",
        ),
        (
            COMPLETIONS,
            TEXT | {"structured_outputs": {"choice": ["b"]}, "ignore_eos": True},
            "structured_outputs",
            "leave out ignore_eos",
        ),
        (CHATS, CHAT | {"top_logprobs": 2}, "top_logprobs", "only for logprobs"),
        (
            CHATS,
            CHAT | {"max_tokens": 2, "max_completion_tokens": 3},
            "max_tokens",
            "leave it out beside",
        ),
        (
            CHATS,
            CHAT | {"prediction": {"type": "content", "content": "x"}, "method": "plain"},
            "prediction",
            "method of its own",
        ),
        (RESPONSES, {"input": "x", "store": True}, "store", "not supported"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text", "schema"),
        ("/tokenize", {}, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt", "surrogate"),
        (COMPLETIONS, TEXT | {"stop": ["x", "\ud800"]}, "stop", "surrogate"),
        (CHATS, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogate"),
        ("/detokenize", {"tokens": [280]}, "tokens", "out of range"),
    ],
)
def test_bad_requests(
    client_of: Callable[..., TestClient], path: str, body: Any, param: str, message: str
) -> None:
    response = client_of(tiny_engine()).post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert re.search(message, error["message"]), error


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"prompt": NaN}'])
def test_a_body_that_is_no_object(client: TestClient, body: bytes) -> None:
    response = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_other_paths_and_verbs(client: TestClient) -> None:
    assert client.get("/v1/nothing").status_code == 404
    assert client.get(COMPLETIONS).status_code == 405
    assert client.get("/v1/nothing").json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_accepted(client: TestClient) -> None:
    body = CHAT | {"tools": [], "min_tokens": 0, "response_format": {"type": "text"}, "n": None}
    assert client.post(CHATS, json=body | {"max_tokens": 1, "user": "x"}).status_code == 200


def test_every_parameter_reaches_the_engine(client: TestClient) -> None:
    """Each changes the output, and to what the engine makes of it."""
    settings: dict[str, Any] = {
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.3,
        "repetition_penalty": 3.0,
        "presence_penalty": 5.0,
        "frequency_penalty": 5.0,
        "logit_bias": {"40": 60.0},
        "stop": "o",
        "temperature": 3.0,
    }
    engine = tiny_engine()
    seen = set()
    for name, value in settings.items():
        body = {"prompt": "hello", "max_tokens": 14, "seed": 4, "ignore_eos": True, name: value}
        text = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
        given = {40: 60.0} if name == "logit_bias" else value
        sampling = Sampling(max_new_tokens=14, seed=4, ignore_eos=True, **{name: given})
        assert text == engine.generate("hello", sampling).text, name
        seen.add(text)
    assert len(seen) >= 8


def test_without_a_seed_outputs_differ(client: TestClient) -> None:
    body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}
    texts = {client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3  # equal by chance: below 1e-20


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_is_what_lm_eval_reads(client: TestClient, stream: bool) -> None:
    engine = tiny_engine()
    ids = list(engine.encode("def f(x):\n"))
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    response = client.post(COMPLETIONS, json=body | {"stream": stream})
    if stream:
        parts = [each["choices"][0] for each in events(response.text)]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        logprobs = {
            name: [each for part in parts for each in part["logprobs"][name]] for name in names
        }
        text = "".join(part["text"] for part in parts)
    else:
        (choice,) = response.json()["choices"]
        logprobs, text = choice["logprobs"], choice["text"]
    assert text.startswith("def f(x):\n")
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    scored = engine.prompt_logprobs(ids)
    assert logprobs["token_logprobs"][1 : len(ids)] == list(scored.logprobs)
    last = logprobs["token_logprobs"][-1]
    assert last == max(logprobs["top_logprobs"][-1].values())  # greedy, bit for bit
    for token, at in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert text[at : at + len(token)] == token


def test_echo_alone_generates_nothing(client: TestClient) -> None:
    body = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 0}
    done = client.post(COMPLETIONS, json=body).json()
    assert done["choices"][0]["text"] == "hello"
    assert done["usage"]["completion_tokens"] == 0
    assert len(done["choices"][0]["logprobs"]["tokens"]) == done["usage"]["prompt_tokens"]


def test_speculation_is_chosen_and_reported_per_request(client: TestClient) -> None:
    body = TEXT | {
        "max_tokens": 20, "temperature": 0, "ignore_eos": True,
        "speculation_metrics": "detailed", "return_token_origins": True, "return_token_ids": True,
    }  # fmt: skip
    replies = {
        name: client.post(COMPLETIONS, json=body | more).json()
        for name, more in {
            "default": {},
            "off": {"num_speculative_tokens": 0},
            "short": {"num_speculative_tokens": 2},
            "plain": {"method": "plain"},
            "suffix": {"method": "suffix"},
            "lossy": {"divergence_budget": 0.5, "temperature": 1},
        }.items()
    }
    told = {name: reply["metrics"]["speculative_decoding"] for name, reply in replies.items()}
    lossless = [replies[name]["choices"][0]["text"] for name in replies if name != "lossy"]
    assert len(set(lossless)) == 1
    for name, metrics in told.items():
        choice = replies[name]["choices"][0]
        accepted = choice["token_origins"].count("accepted")
        assert len(choice["token_ids"]) == len(choice["token_origins"]) == 20
        assert metrics["num_accepted_draft_tokens"] == accepted
        assert sum(metrics["per_step_accepted"]) == accepted
        assert sum(metrics["per_step_drafted"]) == metrics["num_draft_tokens"]
        assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
        by_length = metrics["acceptance_histogram_by_draft_length"].values()
        assert sum(map(sum, by_length)) == metrics["num_spec_steps"]
    assert told["default"]["num_accepted_draft_tokens"] > 0
    assert told["off"]["num_draft_tokens"] == told["plain"]["num_draft_tokens"] == 0
    assert set(replies["off"]["choices"][0]["token_origins"]) == {"plain"}
    assert max(told["short"]["per_step_drafted"]) == 2
    assert told["lossy"]["kl_per_token"] > 0


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/nothing", 404, "there is no /nothing"),
        ("GET", COMPLETIONS, 405, "does not take GET: use POST"),
        ("POST", COMPLETIONS, 400, "'Content-Type: application/json'"),
    ],
)
def test_requests_that_no_route_reads(
    client: TestClient, method: str, path: str, status: int, words: str
) -> None:
    kind = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d sends
    body = json.dumps(TEXT) if method == "POST" else None
    response = client.request(method, path, content=body, headers=kind if body else None)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


def test_too_many_prompts_for_the_queue_are_a_wrong_prompt(
    client_of: Callable[..., TestClient],
) -> None:
    client = client_of(tiny_engine(max_batch_size=2), max_queue=0)
    for more, param in (({"prompt": ["a"] * 3}, "prompt"), ({"prompt": "a", "n": 3}, "n")):
        response = client.post(COMPLETIONS, json=more)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_the_draft_length_of_another_method_is_at_most_the_servers_or_its_own(
    client_of: Callable[..., TestClient],
) -> None:
    client = client_of(tiny_engine(γ=8))
    body = TEXT | {"method": "suffix", "speculation_metrics": "summary", "max_tokens": 4}
    suffix = client.post(COMPLETIONS, json=body).json()["metrics"]["speculative_decoding"]
    most = max(8, suffix["num_spec_tokens"])
    for number, status in ((0, 200), (8, 200), (most, 200), (most + 1, 400), (-1, 400)):
        response = client.post(COMPLETIONS, json=body | {"num_speculative_tokens": number})
        assert response.status_code == status, response.text
    assert f"from 0 (off) to {most}" in response.json()["error"]["message"]


def test_a_stream_has_its_usage_and_metrics_last(client: TestClient) -> None:
    body = TEXT | {"max_tokens": 9, "stream": True, "speculation_metrics": "summary"}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = events(client.post(COMPLETIONS, json=body | {"ignore_eos": True}).text)
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_tokens"] == 4
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)


def test_a_cached_prompt_counts_once(client_of: Callable[..., TestClient]) -> None:
    """Like the prompt itself, however many outputs it has."""
    client = client_of(tiny_engine(prefix_cache="1MiB"))
    body = {"prompt": ["def f(x):", "print(hello"], "n": 3, "max_tokens": 4, "ignore_eos": True}
    first, again = (client.post(COMPLETIONS, json=body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert cached == again["prompt_tokens"] - 2  # all tokens but the last ones


def test_tokenizer_endpoints(client: TestClient) -> None:
    body = {"prompt": "def f(x):", "return_token_strs": True, "add_special_tokens": False}
    tokens = client.post("/tokenize", json=body).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    back = client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": "def f(x):"}
    chat = client.post("/tokenize", json=CHAT).json()
    assert chat["tokens"] == list(tiny_engine().encode(CHAT["messages"]))
    assert client.get("/tokenizer_info").json()["eos_token"] == "<eos>"


def test_a_model_without_a_tokenizer_takes_token_ids(
    client_of: Callable[..., TestClient],
) -> None:
    client = client_of(engine_of(tiny()))
    done = client.post(COMPLETIONS, json={"prompt": [1, 2], "max_tokens": 4, "logprobs": 1})
    assert done.status_code == 200
    assert client.post(COMPLETIONS, json=TEXT).status_code == 400
    assert client.post("/tokenize", json=TEXT).json()["error"]["code"] == "no_tokenizer"


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            CHATS,
            CHAT
            | {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        (
            RESPONSES,
            {
                "input": "hello",
                "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}},
            },
        ),
        (COMPLETIONS, TEXT | {"structured_outputs": {"json": SCHEMA}, "max_tokens": 100}),
        (COMPLETIONS, TEXT | {"structured_outputs": {"choice": ['{"ok":true}']}}),
    ],
)
def test_structured_output(client: TestClient, path: str, body: dict[str, Any]) -> None:
    done = client.post(path, json=body | {"seed": 3, "temperature": 2.0}).json()
    if path == RESPONSES:
        text, ended = done["output"][0]["content"][0]["text"], done["status"] == "completed"
    else:
        (choice,) = done["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        ended = choice["finish_reason"] == "stop"
    assert ended, done
    assert set(json.loads(text)) == {"ok"}


def test_errors_do_not_tell_where_the_model_lies(client_of: Callable[..., TestClient]) -> None:
    engine = tiny_engine()
    engine.target.name = "folder/of/the/operator"
    engine.target.tokenizer.chat_template = None  # type: ignore[union-attr]
    response = client_of(engine, model_name="model").post(CHATS, json=CHAT)
    error = response.json()["error"]
    assert error["message"].startswith("model has no chat template")
    assert error["param"] == "messages"
