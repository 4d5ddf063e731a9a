"""Conversations of a chat model with itself: their form, and that an interrupted run goes on."""

import json
import random

import pytest
from rich.console import Console
from tiny_distillation import target, tokenizer

from outrider.train.distill.answers import plain_engine
from outrider.train.heads.samples import read_samples
from recipes import self_chat
from recipes.self_chat import Asked, converse, make_chunk, passages, summaries, user_turn


@pytest.fixture
def small(monkeypatch):
    for name, value in {"ATTEMPTS": 12, "FROM_FILE": 3, "ARTICLES": 2}.items():
        monkeypatch.setattr(self_chat, name, value)
    monkeypatch.setattr(self_chat, "MESSAGE_TOKENS", 24)
    monkeypatch.setattr(self_chat, "ANSWER_TOKENS", 16)
    monkeypatch.setattr(
        self_chat.outrider, "load", lambda *_, **__: plain_engine(target(), 8), raising=False
    )


def test_a_user_turn_ends_with_the_opening():
    engine = plain_engine(target(), 1)
    assert user_turn(engine, "", "Write ") == "<user>Write "
    assert user_turn(engine, "Be brief.", "").endswith("<user>")


def test_a_chunk_depends_on_its_number_and_the_seed(small):
    engine = plain_engine(target(), 8)
    chunk = make_chunk(engine, 3, [], ["print(x)"], [], seed=5)
    assert chunk == make_chunk(engine, 3, [], ["print(x)"], [], seed=5)
    assert chunk != make_chunk(engine, 4, [], ["print(x)"], [], seed=5)
    assert {line["messages"][-2]["content"] for line in chunk} >= {"print(x)"}
    for line in chunk:
        assert [message["role"] for message in line["messages"]][-2:] == ["user", "assistant"]
        assert line["num_tokens"] <= 16


def test_summaries_are_asked_for_of_long_answers_only():
    long, short = "a" * 601, "b" * 600
    asked = list(summaries([long, short], random.Random(0)))
    assert len(asked) == 1
    assert all(long in each.message and short not in each.message for each in asked)
    assert asked[0].conversation[-1] == {"role": "user", "content": asked[0].message}
    assert Asked("", "hi").conversation == [{"role": "user", "content": "hi"}]


def test_passages_are_whole_lines_of_a_text():
    lines = [f"line {i} has five words" for i in range(2000)]
    asked = list(passages(["\n".join(lines)], random.Random(0)))
    assert len(asked) == self_chat.PASSAGES
    for each in asked:
        passage = each.message[each.message.index("line ") :].splitlines()
        begin = lines.index(passage[0])
        assert passage == lines[begin : begin + len(passage)]
        assert 120 <= 5 * len(passage) < 605
    assert list(passages([], random.Random(0))) == []


def test_an_interrupted_run_goes_on(small, tmp_path, monkeypatch):
    console = Console(quiet=True)
    file = converse("target", tmp_path, 60, ["print(x)"], [], 0, console)
    first = file.read_text()
    assert sum(json.loads(line)["num_tokens"] for line in first.splitlines()) >= 60
    assert read_samples(file, tokenizer(), 64)
    monkeypatch.setattr(self_chat, "make_chunk", lambda *_: pytest.fail("was kept"))
    assert converse("target", tmp_path, 60, ["print(x)"], [], 0, console).read_text() == first
