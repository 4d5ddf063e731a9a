"""Property: whatever the body, the status is one of the documented ones and no row stays."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_servers import tiny_engine

from outrider.serve.app import create_app
from outrider.serve.settings import ServerSettings

DOCUMENTED = {200, 400, 404, 408, 413, 429, 503}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["plain", "suffix", "mentored", "user", "content", "text", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
SMALL = st.integers(-2, 40)
NEARLY = {
    "prompt": st.text(max_size=9) | st.lists(st.integers(-1, 300), max_size=4) | ANYTHING,
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "x"]), "content": st.text(max_size=5)}
        ),
        max_size=2,
    ),
    "input": st.text(max_size=9),
    "tokens": st.lists(st.integers(-1, 300), max_size=4),
    "max_tokens": SMALL,
    "max_completion_tokens": SMALL,
    "max_output_tokens": SMALL,
    "temperature": st.floats(-1, 3) | st.just(0),
    "top_p": st.floats(-0.5, 1.5),
    "top_k": st.integers(-2, 300),
    "min_p": st.floats(-0.5, 1.5),
    "repetition_penalty": st.floats(-1, 3),
    "presence_penalty": st.floats(),
    "logit_bias": st.dictionaries(
        st.integers(-1, 300).map(str) | st.text(max_size=3), st.floats(-120, 120), max_size=3
    ),
    "seed": st.integers(-(2**64), 2**64),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 2**70), max_size=2),
    "n": st.integers(0, 4),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.integers(-1, 21) | st.booleans(),
    "top_logprobs": st.integers(-1, 21),
    "method": st.sampled_from(["plain", "suffix", "mentored", "sequoia", "greedy", "medusa", "x"]),
    "method_options": st.dictionaries(st.sampled_from(["budget", "shape", "x"]), ANYTHING),
    "num_speculative_tokens": st.integers(-1, 9),
    "divergence_budget": st.floats(-1, 2),
    "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": st.text()}),
    "return_token_ids": st.booleans(),
    "speculation_metrics": st.sampled_from(["summary", "detailed", "x"]),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema"])},
        optional={"json_schema": st.fixed_dictionaries({"schema": ANYTHING})},
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar"]), ANYTHING, max_size=1
    ),
    "tools": ANYTHING,
    "unknown": ANYTHING,
}
NEEDED = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
}


@st.composite
def requests(draw: Any) -> tuple[str, Any]:
    """A path and a body that is nearly right: the field it needs, and a few others."""
    path = draw(st.sampled_from(PATHS))
    names = draw(st.sets(st.sampled_from(sorted(NEARLY)), max_size=4))
    if draw(st.integers(0, 9)):
        names.add(NEEDED[path])
    body = {name: draw(NEARLY[name]) for name in names}
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.sampled_from(sorted(NEARLY)))] = draw(ANYTHING)
    return path, body


@pytest.fixture(scope="module")
def server() -> Iterator[TestClient]:
    app = create_app(tiny_engine(), ServerSettings(max_methods=3))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(requests())
def test_only_documented_status_codes(server: TestClient, request_: tuple[str, Any]) -> None:
    path, body = request_
    response = server.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code in DOCUMENTED, response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif "data:" in response.text[:10]:
        assert '"code":"internal_error"' not in response.text
    service = server.app.state.service  # type: ignore[attr-defined]
    assert service.num_open == 0
