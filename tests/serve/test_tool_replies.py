"""Answers are split into text and calls of functions, however they are cut into pieces."""

import json
import random
from typing import Any

import pytest

from outrider.serve.tools.formats import HERMES, LLAMA, MISTRAL, CallFormat
from outrider.serve.tools.reply import CallDelta, Delta, Reply

NAMES = ("add", "now")
ADD = '{"name": "add", "arguments": {"a": [1, 2], "s": "}\\"{"}}'
ADDED = ("add", {"a": [1, 2], "s": '}"{'})
NOW = ("now", {})

ANSWERS: list[tuple[CallFormat, str, str, list[tuple[str, Any]]]] = [
    (HERMES, "no call", "no call", []),
    (HERMES, "a < b <tool_", "a < b <tool_", []),
    (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", "", [ADDED]),
    (HERMES, f"Sure.\n<tool_call>\n{ADD}\n</tool_call>", "Sure.\n", [ADDED]),
    (HERMES, f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>", "", [ADDED, ADDED]),
    (HERMES, f"<tool_call>[{ADD}, {ADD}]</tool_call>", "", [ADDED, ADDED]),
    (HERMES, f"<tool_call>{ADD}</tool_call> done", "done", [ADDED]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}', "", [("add", {"a": 1})]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", {"a": 1})]),
    (HERMES, "<tool_call>what?", "<tool_call>what?", []),
    (HERMES, '<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
    (HERMES, '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    (HERMES, "<tool_call>{name: add}", "<tool_call>{name: add}", []),
    (HERMES, "<tool_call>", "<tool_call>", []),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    (
        LLAMA,
        '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        "",
        [("add", {"a": 1}), NOW],
    ),
    (
        LLAMA,
        '{"type": "function", "name": "now", "parameters": {}}',
        "",
        [NOW],
    ),
    (LLAMA, '{"name": "Bob", "parameters": 3}', '{"name": "Bob", "parameters": 3}', []),
    (LLAMA, '{"age": 3} is JSON', '{"age": 3} is JSON', []),
    (LLAMA, 'It is {"name": "now"}', 'It is {"name": "now"}', []),
    (MISTRAL, f"[TOOL_CALLS] [{ADD}, {ADD}]", "", [ADDED, ADDED]),
    (MISTRAL, f" [{ADD}]", "", [ADDED]),  # the mark is a special token, and not shown
    (MISTRAL, "[1] is a source", "[1] is a source", []),
]


def deltas_of(format: CallFormat, pieces: list[str], parallel: bool = True) -> tuple[Reply, Any]:
    reply = Reply(format, NAMES, parallel)
    deltas: list[Delta] = []
    for number, piece in enumerate(pieces, 1):
        deltas += reply.take(piece, over=number == len(pieces))
    return reply, deltas


def cut(text: str, seed: int) -> list[str]:
    chosen = random.Random(seed)
    ends = sorted(chosen.sample(range(len(text) + 1), min(len(text), chosen.randrange(9))))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize(("format", "answer", "text", "calls"), ANSWERS, ids=lambda each: None)
def test_text_and_calls(format: CallFormat, answer: str, text: str, calls: Any) -> None:
    ways = [[answer], list(answer), *(cut(answer, seed) for seed in range(20))]
    for pieces in ways:
        reply, deltas = deltas_of(format, pieces)
        assert reply.text == text, pieces
        assert [(each.name, json.loads(each.arguments)) for each in reply.calls] == calls, pieces
        assert "".join(each for each in deltas if isinstance(each, str)) == text
        told = [each for each in deltas if isinstance(each, CallDelta)]
        for call in reply.calls:
            mine = [each for each in told if each.call is call]
            assert [each.begins for each in mine] == [True] + [False] * (len(mine) - 1)
            assert "".join(each.arguments for each in mine) == call.arguments


def test_arguments_arrive_as_they_are_written() -> None:
    _, deltas = deltas_of(HERMES, list(f"<tool_call>{ADD}</tool_call>"))
    assert len(deltas) == len('{"a": [1, 2], "s": "}\\"{"}')


def test_one_call_where_only_one_may_be() -> None:
    answer = f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>"
    for pieces in ([answer], list(answer), list(answer[:-14])):
        reply, _ = deltas_of(HERMES, pieces, parallel=False)
        assert len(reply.calls) == 1
        assert reply.text == ""


def test_a_cut_call_keeps_what_there_is() -> None:
    reply, _ = deltas_of(HERMES, ['<tool_call>{"name": "add", "arguments": {"a": '])
    assert [(each.name, each.arguments) for each in reply.calls] == [("add", '{"a": ')]
    assert reply.text == ""


def test_without_tools_everything_is_text() -> None:
    reply = Reply()
    assert reply.take(f"<tool_call>{ADD}", over=True) == [f"<tool_call>{ADD}"]
    assert reply.calls == []
