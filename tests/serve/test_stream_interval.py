"""How rounds are put together in the chunks of a stream, and that nothing is lost by it."""

import asyncio
import json
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tiny_servers import tiny_engine

from outrider import Sampling
from outrider.serve.worker import Subscriber, Worker

BODY = {
    "prompt": "def f(x):",
    "max_tokens": 40,
    "seed": 7,
    "ignore_eos": True,
    "n": 2,
    "return_token_ids": True,
    "return_rounds": True,
}


def chunks(client: TestClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of all chunks of a stream."""
    lines = client.post("/v1/completions", json=body | {"stream": True}).text.splitlines()
    documents = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [choice for each in documents for choice in each["choices"]]


def joined(parts: list[dict[str, Any]], index: int) -> tuple[str, list[int], list[Any], str]:
    """An output: its text, tokens, rounds and end."""
    mine = [each for each in parts if each["index"] == index]
    return (
        "".join(each["text"] for each in mine),
        [token for each in mine for token in each["token_ids"]],
        [round_ for each in mine for round_ in each["rounds"]],
        mine[-1]["finish_reason"],
    )


@pytest.mark.parametrize("interval", [0, 3600])
def test_a_stream_says_what_the_whole_answer_says(
    client_of: Callable[..., TestClient], interval: float
) -> None:
    client = client_of(stream_interval=interval)
    whole = client.post("/v1/completions", json=BODY).json()["choices"]
    parts = chunks(client, BODY)
    for index, choice in enumerate(whole):
        assert joined(parts, index) == joined([choice], index)


class AtOnce(asyncio.AbstractEventLoop):
    """An event loop that is never busy."""

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **_: Any) -> Any:
        callback(*args)


def test_without_an_interval_each_round_is_handed_over() -> None:
    """By a loop that is never busy; a busy one puts what has arrived meanwhile in one chunk."""
    engine = tiny_engine()
    steps: list[Any] = []
    end = Event()

    def take(new: list[Any]) -> None:
        steps.extend(new)
        if new[-1].over:
            end.set()

    request = engine.request("def f(x):", Sampling(seed=7, max_new_tokens=40, ignore_eos=True))
    worker = Worker()
    worker.start()
    worker.submit(Subscriber(engine, [request], take, AtOnce(), interval=0))
    assert end.wait(60)
    worker.stop()
    assert len(steps) > 5
    assert all(len(step.done) == 1 for step in steps)


def test_the_first_round_is_sent_at_once_and_the_last_ones_at_the_end(
    client_of: Callable[..., TestClient],
) -> None:
    first, last = chunks(client_of(stream_interval=3600), BODY | {"n": 1})
    assert len(first["rounds"]) == 1
    assert len(last["rounds"]) > 5
    assert (first["finish_reason"], last["finish_reason"]) == (None, "length")


def test_the_metrics_count_every_round(client_of: Callable[..., TestClient]) -> None:
    client = client_of(stream_interval=3600)
    (choice,) = client.post("/v1/completions", json=BODY | {"n": 1}).json()["choices"]
    counted = {
        line.split("{")[0]: float(line.split()[-1])
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("vllm:")
    }
    drafted = [each["drafted"] for each in choice["rounds"] if each["drafted"]]
    assert counted["vllm:generation_tokens_total"] == len(choice["token_ids"])
    assert counted["vllm:spec_decode_num_drafts_total"] == len(drafted)
    assert counted["vllm:spec_decode_num_draft_tokens_total"] == sum(map(len, drafted))
    first = [each["outcome"] for each in choice["rounds"][0]["drafted"]].count("accepted") + 1
    later = len(choice["token_ids"]) - first
    assert counted["vllm:inter_token_latency_seconds_count"] == later
