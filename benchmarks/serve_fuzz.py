"""Random requests against one server: whatever the body, a documented status and no row left.

    python -m benchmarks.serve_fuzz                         # 2,000 requests
    python -m benchmarks.serve_fuzz --requests 100000       # the bar

Bodies are nearly right: the field that the endpoint needs and a few others, each of values that are
mostly of its type. ``tests/serve/test_fuzz.py`` sends a few hundred of them. Requests come in parts
of 1,000, each with a seed of its own. Writes ``runs/serve/fuzz.json`` after each part; the same
command goes on after the last one, or begins anew where none was missing. Fails if a status is not
documented, if an error is not in OpenAI's format, or if an output is left.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

PART = 1_000
DOCUMENTED = {200, 400, 404, 408, 413, 429, 503}
PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
]

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
SHORT = st.integers(1, 12)
SCHEMA = st.fixed_dictionaries(
    {"type": st.sampled_from(["object", "string", "integer", "array", "nothing"])},
    optional={
        "properties": st.dictionaries(st.text(max_size=3), ANYTHING, max_size=2),
        "required": st.lists(st.text(max_size=3), max_size=2),
        "enum": st.lists(ANYTHING, max_size=2),
        "pattern": st.text(max_size=4),
        "$ref": st.sampled_from(["#", "#/$defs/x", "http://localhost/x"]),
    },
)
FUNCTION = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "", "a b"]) | st.text(max_size=4)},
    optional={
        "description": st.text(max_size=4),
        "parameters": SCHEMA | ANYTHING,
        "strict": st.booleans(),
    },
)
TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION})
CALL = st.fixed_dictionaries(
    {
        "id": st.text(max_size=3),
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.text(max_size=3), "arguments": st.sampled_from(["{}", "[", "1", '{"a":1}'])}
        ),
    }
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "x"])},
    optional={
        "content": st.text(max_size=5) | ANYTHING,
        "name": st.text(max_size=3),
        "tool_call_id": st.text(max_size=3),
        "tool_calls": st.lists(CALL, max_size=2),
    },
)
NEARLY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=9) | st.lists(st.integers(-1, 300), max_size=4) | ANYTHING,
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system"]), "content": st.text(max_size=5)}
        )
        | MESSAGE,
        max_size=3,
    ),
    "input": st.text(max_size=9) | st.lists(MESSAGE, max_size=2),
    "instructions": st.text(max_size=5),
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
    "frequency_penalty": st.floats(),
    "logit_bias": st.dictionaries(
        st.integers(-1, 300).map(str) | st.text(max_size=3), st.floats(-120, 120), max_size=3
    ),
    "seed": st.integers(-(2**64), 2**64),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 2**70), max_size=2),
    "ignore_eos": st.booleans(),
    "n": st.integers(0, 4),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {"include_usage": st.booleans()}, optional={"continuous_usage_stats": st.booleans()}
    ),
    "echo": st.booleans(),
    "logprobs": st.integers(-1, 21) | st.booleans(),
    "top_logprobs": st.integers(-1, 21),
    "method": st.sampled_from(["plain", "suffix", "mentored", "sequoia", "greedy", "medusa", "x"]),
    "method_options": st.dictionaries(
        st.sampled_from(["budget", "shape", "x"]), ANYTHING, max_size=2
    ),
    "num_speculative_tokens": st.integers(-1, 9),
    "divergence_budget": st.floats(-1, 2),
    "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": st.text()}),
    "return_token_ids": st.booleans(),
    "return_token_origins": st.booleans(),
    "return_pieces": st.booleans(),
    "return_rounds": st.booleans(),
    "speculation_metrics": st.sampled_from(["summary", "detailed", "x"]),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema"])},
        optional={"json_schema": st.fixed_dictionaries({"schema": SCHEMA | ANYTHING})},
    ),
    "text": st.fixed_dictionaries(
        {"format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object"])})}
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar"]), SCHEMA | ANYTHING, max_size=1
    ),
    "tools": st.lists(TOOL | FUNCTION, max_size=2) | ANYTHING,
    "tool_choice": st.sampled_from(["none", "auto", "required"])
    | TOOL
    | st.fixed_dictionaries({"type": st.just("function"), "name": st.just("f")})
    | ANYTHING,
    "parallel_tool_calls": st.booleans(),
    "unknown": ANYTHING,
}
NEEDED = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
}
LENGTHS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


@st.composite
def requests(draw: Any) -> tuple[str, Any]:
    """A path and a body that is nearly right: the field it needs, and a few others."""
    path = draw(st.sampled_from(PATHS))
    names = draw(st.sets(st.sampled_from(sorted(NEARLY)), max_size=4))
    if draw(st.integers(0, 9)):
        names.add(NEEDED[path])
    body = {name: draw(NEARLY[name]) for name in names}
    if path in LENGTHS and draw(st.integers(0, 19)):  # the others run to the end of the context
        body.setdefault(LENGTHS[path], draw(SHORT))
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.sampled_from(sorted(NEARLY)))] = draw(ANYTHING)
    return path, body


def check(client: Any, path: str, body: Any) -> int:
    """Sends a request; its status.

    Args:
        client: with a ``post`` as that of httpx.
        path, body: the request.

    Raises:
        AssertionError: the response is not as documented.
    """
    sent = {"content": json.dumps(body), "headers": {"content-type": "application/json"}}
    response = client.post(path, **sent)
    status = int(response.status_code)
    assert status in DOCUMENTED, f"status {status}: {response.text}"
    if status != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"], error
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert '"code":"internal_error"' not in response.text, response.text
        last = [line for line in response.text.splitlines() if line][-1]
        is_error = last.startswith('data: {"error"')
        assert is_error or last == "data: [DONE]" or '"type":"response.' in last, last
    else:
        response.json()
    return status


def fuzz_part(client: Any, service: Any, part_seed: int, num: int) -> Counter[str]:
    """Sends so many requests; how often each path had which status."""
    statuses: Counter[str] = Counter()

    @seed(part_seed)
    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    def fuzz(request: tuple[str, Any]) -> None:
        status = check(client, *request)
        assert service.num_open == 0
        statuses[f"{request[0]} {status}"] += 1

    fuzz()
    return statuses


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--requests", type=int, default=2_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--output", type=Path, default=Path("runs/serve/fuzz.json"))
    return options


def earlier_parts(path: Path, first_seed: int, num: int) -> list[dict[str, Any]]:
    """The parts that an earlier run with this seed has done of so many; none if it has done all,
    so that the same command tests anew."""
    if not path.exists():
        return []
    kept = json.loads(path.read_text())
    parts = list(kept["parts"]) if kept.get("seed") == first_seed else []
    return parts if len(parts) < num else []


def main(arguments: list[str] | None = None) -> int:
    """Sends the requests to a tiny random model; the exit status."""
    given_ = parser().parse_args(arguments)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fastapi.testclient import TestClient
    from tiny_servers import calling_engine

    from outrider.serve.app import create_app
    from outrider.serve.settings import ServerSettings

    num = math.ceil(given_.requests / PART)
    parts = earlier_parts(given_.output, given_.seed, num)
    given_.output.parent.mkdir(parents=True, exist_ok=True)
    app = create_app(calling_engine(context=384), ServerSettings(max_methods=3, request_timeout=60))
    with TestClient(app, raise_server_exceptions=False) as client:
        service = app.state.service
        for number in range(len(parts), num):
            began = time.monotonic()
            statuses = fuzz_part(client, service, given_.seed + number, PART)
            seconds = time.monotonic() - began
            parts.append({"seconds": seconds, "statuses": dict(statuses)})
            kept = {"seed": given_.seed, "parts": parts}
            given_.output.write_text(json.dumps(kept, indent=1))
            print(f"{(number + 1) * PART} requests, the last {PART} in {seconds:.0f} s", flush=True)
        worker = service.worker
        left = worker.call(lambda: worker.num_running + worker.num_waiting).result()
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part["statuses"])
    print(f"{sum(total.values())} requests; {dict(sorted(total.items()))}; {left} left")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
