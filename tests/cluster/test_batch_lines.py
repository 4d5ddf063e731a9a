"""Lines of a batch: what they ask for, which are malformed, and the lines that answer them."""

import json
from typing import Any

import pytest
from tiny_servers import tiny_engine

from outrider import Engine, Sampling
from outrider.cluster.batch.answer import Answers, BlockAnswerer
from outrider.cluster.batch.blocks import Block
from outrider.cluster.batch.lines import Asking, LineError, read_line

ASKING = Asking(Sampling(max_new_tokens=5, seed=3), model_name="tiny")
FIRST = 11


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(max_batch_size=4)


def answer(engine: Engine, *lines: object, asking: Asking = ASKING) -> Answers:
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return BlockAnswerer(engine, asking)(Block(0, FIRST, tuple(raw)))


def records(answers: Answers) -> list[Any]:
    return [json.loads(line) for line in answers.text.splitlines()]


def test_a_prompt_is_continued_with_the_random_numbers_of_its_line(engine: Engine) -> None:
    same = {"prompt": "abc", "id": 7, "answer": "old"}
    found = records(answer(engine, same, same, {"prompt": "d"}))
    expected = engine.generate(
        ["abc", "abc", "d"], ASKING.sampling, request_numbers=range(FIRST, FIRST + 3)
    )
    assert [each["answer"] for each in found] == [result.text for result in expected]
    assert found[0]["id"] == 7
    assert found[0]["num_tokens"] == 5
    assert found[0]["answer"] != found[1]["answer"], "equal prompts of two lines are two samples"


def test_answers_do_not_depend_on_the_block(engine: Engine) -> None:
    lines = [json.dumps({"prompt": "x" * n}).encode() for n in range(1, 8)]
    answerer = BlockAnswerer(engine, ASKING)
    whole = answerer(Block(0, 1, tuple(lines))).text
    parts = [answerer(Block(n, 1 + n, (line,))).text for n, line in enumerate(lines)]
    assert whole == "".join(parts)


def test_a_conversation_gets_an_answer_in_place_of_the_one_it_has(engine: Engine) -> None:
    asked = [{"role": "user", "content": "hi"}]
    old = {"role": "assistant", "content": "old"}
    without, replaced = records(
        answer(engine, {"messages": asked, "label": 1}, {"messages": [*asked, old]})
    )
    assert without["messages"][:-1] == replaced["messages"][:-1] == asked
    assert without["label"] == 1
    assert replaced["messages"][-1]["role"] == "assistant"
    assert replaced["messages"][-1]["content"] != "old"


def test_chat_asks_a_prompt_as_a_message(engine: Engine) -> None:
    asking = Asking(ASKING.sampling, chat=True, system="Be brief.")
    [found] = records(answer(engine, {"prompt": "hi"}, asking=asking))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    expected = engine.chat(messages, ASKING.sampling, request_number=FIRST)
    assert found["answer"] == expected.text


def test_openai_lines_take_their_settings_from_the_body(engine: Engine) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    text = {"prompt": "abc", "max_tokens": 2, "seed": 9, "model": "tiny"}
    first, second = records(
        answer(
            engine,
            {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            {"custom_id": "b", "url": "/v1/completions", "body": text},
        )
    )
    assert (first["custom_id"], first["error"]) == ("a", None)
    body = first["response"]["body"]
    greedy = Sampling(temperature=0, max_new_tokens=3)
    assert body["choices"][0]["message"]["content"] == engine.chat(chat["messages"], greedy).text
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3
    expected = engine.generate(
        ["abc"], Sampling(max_new_tokens=2, seed=9), request_numbers=[FIRST + 1]
    )
    assert second["response"]["body"]["choices"][0]["text"] == expected[0].text
    assert second["response"]["body"]["model"] == "tiny"


def test_what_an_earlier_run_wrote_is_left_out(engine: Engine) -> None:
    """The lines of an output may be asked again."""
    too_long, old = "x" * 500, {"line": 3, "message": "old"}
    before = {"answer": "old", "error": old, "finish_reason": "stop", "num_tokens": 1}
    asked = [{"role": "user", "content": too_long}]
    answered, failed, malformed, conversation = records(
        answer(
            engine,
            {"prompt": "a", "error": old},
            {"prompt": too_long, "id": 1, **before},
            {"prompt": 3, **before},
            {"messages": [*asked, {"role": "assistant", "content": "old"}], "answer": "label"},
        )
    )
    assert answered.keys() == {"prompt", "answer", "finish_reason", "num_tokens"}
    assert failed.keys() == {"prompt", "id", "error"}
    assert malformed.keys() == {"prompt", "error"}
    assert (conversation["messages"], conversation["answer"]) == (asked, "label")
    assert failed["error"]["line"] == FIRST + 1


@pytest.mark.parametrize("chat", [False, True])
def test_lone_surrogates_are_errors_of_their_line(engine: Engine, chat: bool) -> None:
    message = {"role": "user", "content": "a\ud800"}
    lines = {"prompt": "a\ud800"}, {"messages": [message]}, {"prompt": "b"}
    asking = Asking(ASKING.sampling, chat=chat)
    answers = answer(engine, *lines, asking=asking)
    assert [number for number, _ in answers.errors] == [FIRST, FIRST + 1]
    assert all("lone surrogate" in why for _, why in answers.errors)


def test_malformed_lines_are_reported_and_the_others_answered(engine: Engine) -> None:
    too_long = {"prompt": "x" * 500, "id": 1}
    body = {"prompt": "a", "n": 2}
    answers = answer(
        engine,
        {"prompt": "a"},
        b'{"prompt": "a"',
        too_long,
        {"custom_id": "c", "body": body},
        {"prompt": "b"},
    )
    found = records(answers)
    assert [number for number, _ in answers.errors] == [FIRST + 1, FIRST + 2, FIRST + 3]
    assert ["answer" in each for each in found] == [True, False, False, False, True]
    assert found[1]["error"]["line"] == FIRST + 1
    assert found[2]["id"] == 1
    assert found[3]["custom_id"] == "c"
    assert found[3]["error"]["message"].startswith("n=2")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b"[1]", "a JSON list"),
        (b"\xff", "no UTF-8"),
        (b"{nothing", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"{}", "no prompt"),
        (b'{"prompt": "a", "messages": []}', "both"),
        (b'{"prompt": 3}', "must be a string"),
        (b'{"prompt": "a", "temperature": 0}', "temperature: only a line with a body"),
        (b'{"messages": []}', "must be a list"),
        (b'{"messages": [{"role": "user"}]}', "content"),
        (b'{"body": 3}', "must be an object"),
        (b'{"body": {}, "extra": 1}', "extra: unknown"),
        (b'{"custom_id": 3, "body": {"prompt": "a"}}', "custom_id"),
        (b'{"url": "/v1/embeddings", "body": {"prompt": "a"}}', "url"),
        (b'{"method": "GET", "body": {"prompt": "a"}}', "method"),
        (b'{"body": {"prompt": "a", "temprature": 0}}', "temprature"),
        (b'{"body": {"prompt": ["a", "b"]}}', "2 prompts"),
        (b'{"body": {"prompt": "a", "stream": true}}', "stream"),
        (b'{"body": {"prompt": "a", "logprobs": 0}}', "logprobs"),
        (b'{"body": {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}}', "tools"),
    ],
)
def test_malformed_lines(line: bytes, message: str) -> None:
    with pytest.raises(LineError, match=message):
        read_line(line, ASKING)


def test_a_body_for_another_model(engine: Engine) -> None:
    answers = answer(engine, {"body": {"prompt": "a", "model": "gpt-4o"}})
    assert "this batch runs 'tiny'" in answers.errors[0][1]
