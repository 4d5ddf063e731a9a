"""Tool calls over HTTP, by the official client and by hand."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import llguidance
import openai
import pytest
from fastapi.testclient import TestClient
from tiny_servers import TEMPLATES, calling_engine, tiny_engine

from outrider import Engine, Grammar
from outrider.serve.tools.toolset import Toolset

CHATS = "/v1/chat/completions"
POINT = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/digit"}, "up": {"type": "boolean"}},
    "required": ["x", "up"],
    "additionalProperties": False,
    "$defs": {"digit": {"enum": [1, 2, 3]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "move", "parameters": POINT}},
    {"type": "function", "function": {"name": "stop", "description": "Ends it."}},
]
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "go"}],
    "tools": TOOLS,
    "max_tokens": 100,
    "temperature": 1.5,
}


@pytest.fixture(params=TEMPLATES)
def caller(request: Any, client_of: Callable[..., TestClient]) -> TestClient:
    return client_of(calling_engine(request.param))


@pytest.fixture
def client(client_of: Callable[..., TestClient]) -> Iterator[openai.OpenAI]:
    http = client_of(calling_engine())
    with openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=http) as client:
        yield client


def is_right(name: str, arguments: str) -> bool:
    read = json.loads(arguments)
    if name == "stop":
        return read == {}
    return name == "move" and set(read) == {"x", "up"} and read["x"] in (1, 2, 3)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
def test_demanded_calls_obey_their_schemas(caller: TestClient, choice: Any) -> None:
    for seed in range(3):
        body = CHAT | {"tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
        (answer,) = caller.post(CHATS, json=body).json()["choices"]
        (call,) = answer["message"]["tool_calls"]
        assert is_right(call["function"]["name"], call["function"]["arguments"])
        assert choice == "required" or call["function"]["name"] == "move"
        assert call["id"].startswith("call_")
        assert answer["message"]["content"] is None
        assert answer["finish_reason"] == "tool_calls"


def test_streamed_calls_add_up_to_the_whole(client: openai.OpenAI) -> None:
    body: Any = CHAT | {"model": "tiny", "tool_choice": "required", "seed": 2, "max_tokens": 300}
    whole = client.chat.completions.create(**body).choices[0]
    calls: dict[int, dict[str, str]] = {}
    reason = None
    for chunk in client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        reason = choice.finish_reason or reason
        for each in choice.delta.tool_calls or ():
            call = calls.setdefault(each.index, {"name": "", "arguments": ""})
            call["name"] += each.function.name or ""
            call["arguments"] += each.function.arguments or ""
            assert (each.id is not None) == (each.function.name is not None)
    expected = [each.function for each in whole.message.tool_calls or ()]
    assert expected
    assert list(calls.values()) == [
        {"name": each.name, "arguments": each.arguments} for each in expected
    ]
    assert reason == whole.finish_reason


def test_parallel_calls(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model writes of its own accord is read, too."""
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    answer = Grammar.choice([f"Both.\n{call}\n{call}"])
    monkeypatch.setattr(Toolset, "grammar", lambda self, grammar: answer)
    body: Any = CHAT | {"model": "tiny", "max_tokens": 300}
    message = client.chat.completions.create(**body).choices[0].message
    assert message.content == "Both.\n"
    assert [each.function.name for each in message.tool_calls or ()] == ["stop", "stop"]
    one = client.chat.completions.create(**body, parallel_tool_calls=False).choices[0].message
    assert len(one.tool_calls or ()) == 1


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    body: Any = CHAT | {"model": "tiny", "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.create(**body, seed=1).choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "[done]"}
    body["messages"] = [*CHAT["messages"], message.model_dump(exclude_none=True), result]
    again = client.chat.completions.create(**body)
    assert again.usage is not None
    text = client.post(  # type: ignore[call-overload]
        "http://testserver/tokenize",
        body={"messages": body["messages"], "tools": TOOLS},
        cast_to=object,
    )
    assert text["count"] == again.usage.prompt_tokens
    back = client.post(  # type: ignore[call-overload]
        "http://testserver/detokenize", body={"tokens": text["tokens"]}, cast_to=object
    )
    assert "<tool>[done]" in back["prompt"]
    assert '"name": "move"' in back["prompt"]


def test_strict_functions_bind_calls_in_free_answers() -> None:
    """Text before a call is free; a call of a strict function must obey its schema."""
    strict = json.loads(json.dumps(TOOLS))
    strict[0]["function"]["strict"] = True
    for name in TEMPLATES:
        engine = calling_engine(name)
        from outrider.serve.tools.fields import Tool, tool_use

        functions = [Tool.model_validate(each).function for each in strict]
        use = tool_use(functions, "auto", None)
        assert use is not None
        tools = Toolset.of(use, engine.target.tokenizer, "tiny")
        grammar = tools.grammar(None)
        assert grammar is not None
        key = tools.format.arguments
        begin, before, after = (
            tools.format.begin, tools.format.before, tools.format.after + tools.format.end
        )  # fmt: skip
        prefix = "" if name != "hermes" else "Well. "
        right = f'{prefix}{begin}{before}{{"name": "move", "{key}": {{"x": 1, "up": true}}}}{after}'
        wrong = right.replace('"x": 1', '"x": 7')
        assert is_in(engine, grammar, right), name
        assert is_in(engine, grammar, "Just text."), name
        assert not is_in(engine, grammar, wrong), name


def is_in(engine: Engine, grammar: Grammar, text: str) -> bool:
    from llguidance.hf import from_tokenizer

    tokenizer: Any = engine.target.tokenizer
    notation = llguidance.grammar_from(grammar.kind, grammar.source)
    matcher = llguidance.LLMatcher(from_tokenizer(tokenizer, n_vocab=280, eos_token=[0]), notation)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_json_answer_beside_tools(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body: Any = CHAT | {"model": "tiny", "response_format": format, "parallel_tool_calls": False}
    kinds = set()
    for seed in range(8):
        choice = client.chat.completions.create(**body, seed=seed).choices[0]
        if choice.message.tool_calls:
            kinds.add("call")
        elif choice.finish_reason == "stop":
            assert set(json.loads(choice.message.content or "")) == {"ok"}
            kinds.add("answer")
    assert kinds


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "function: the field is missing|missing"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two functions have the name 'move'"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"tool_choice": "always"}, "tool_choice", "must be 'none', 'auto', 'required'"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice",
            "no function 'fly' in tools, which has move, stop",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools to call"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "leave out",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}
                ],
            },
            "tools",
            r"tools\[0\].function.parameters: .*no",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages",
            "tool_call_id: for role 'tool'",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "a",
                                "type": "function",
                                "function": {"name": "f", "arguments": "{"},
                            }
                        ],
                    }
                ]
            },
            "messages",
            "no valid JSON",
        ),
    ],
)
def test_bad_tools(
    client_of: Callable[..., TestClient], change: Any, param: str, message: str
) -> None:
    import re

    response = client_of(calling_engine()).post(CHATS, json=CHAT | change)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param, error
    assert re.search(message, error["message"]), error


FLAT: list[Any] = [{"type": "function", **each["function"]} for each in TOOLS]


def test_responses_call_functions(client: openai.OpenAI) -> None:
    """The whole response and the stream of events say the same; the conversation goes on."""
    body: Any = {
        "model": "tiny", "input": "go", "tools": FLAT, "tool_choice": "required",
        "max_output_tokens": 300, "temperature": 1.5, "extra_body": {"seed": 3},
    }  # fmt: skip
    whole = client.responses.create(**body)
    calls = [each for each in whole.output if each.type == "function_call"]
    assert calls
    assert len(calls) == len(whole.output)
    assert all(is_right(each.name, each.arguments) for each in calls if each.status == "completed")
    arguments = [""] * len(calls)
    kinds = []
    for event in client.responses.create(**body, stream=True):
        kinds.append(event.type)
        if event.type == "response.function_call_arguments.delta":
            arguments[event.output_index] += event.delta
        if event.type in ("response.completed", "response.incomplete"):
            last = [each for each in event.response.output if each.type == "function_call"]
    assert arguments == [each.arguments for each in calls] == [each.arguments for each in last]
    assert kinds.count("response.output_item.added") == len(calls)
    assert kinds.count("response.function_call_arguments.done") == len(calls)
    assert kinds.count("response.output_item.done") == len(calls)
    call = calls[0]
    again = client.responses.create(
        **body | {"tool_choice": "none", "max_output_tokens": 4},
    )
    assert [each.type for each in again.output] == ["message"]
    history: Any = [
        {"role": "user", "content": "go"},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "[done]"},
    ]
    more = client.responses.create(**body | {"input": history})
    assert more.usage is not None
    assert whole.usage is not None
    assert more.usage.input_tokens > whole.usage.input_tokens


def test_text_and_calls_of_a_response(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    answer = Grammar.choice([f"First.\n{call}\nThen{call}"])
    monkeypatch.setattr(Toolset, "grammar", lambda self, grammar: answer)
    body: Any = {"model": "tiny", "input": "go", "tools": FLAT, "max_output_tokens": 300}
    whole = client.responses.create(**body)
    assert [each.type for each in whole.output] == [
        "message", "function_call", "message", "function_call",
    ]  # fmt: skip
    assert whole.output_text == "First.\nThen"
    *_, last = client.responses.create(**body, stream=True)
    assert last.type == "response.completed"
    assert last.response.output_text == "First.\nThen"
    assert [each.type for each in last.response.output] == [each.type for each in whole.output]


def test_models_without_tools(client_of: Callable[..., TestClient]) -> None:
    http = client_of(tiny_engine())
    error = http.post(CHATS, json=CHAT).json()["error"]
    assert error["param"] == "tools"
    assert "does not tell it of tools" in error["message"]
    assert http.post(CHATS, json=CHAT | {"tool_choice": "none"}).status_code == 200
