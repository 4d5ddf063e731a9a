"""How rounds are put together in the chunks of a stream, and that nothing is lost by it."""

import json
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tiny_servers import AtOnce, tiny_engine

from outrider import Sampling
from outrider.serve.worker import Step, Subscriber, Worker

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


class Loop(AtOnce):
    """An event loop that is never busy, and whose clock goes on by hand."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, Callable[[], Any]]] = []

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, **_: Any) -> Any:
        self._timers.append((self._now + delay, partial(callback, *args)))

    def wait(self, seconds: float) -> None:
        """Lets time pass; timers that are due run."""
        self._now += seconds
        due = [callback for at, callback in self._timers if at <= self._now]
        self._timers = [timer for timer in self._timers if timer[0] > self._now]
        for callback in due:
            callback()


class Stream:
    """A worker whose steps the test runs, and the steps that a stream of it has taken."""

    INTERVAL = 0.02

    def __init__(self, num_outputs: int = 1) -> None:
        self.engine = tiny_engine()
        self.loop = Loop()
        self.taken: list[Step] = []
        self.worker = Worker()
        self.sampling = Sampling(seed=7, max_new_tokens=40, ignore_eos=True)
        requests = [
            self.engine.request("def f(x):", self.sampling, request_number=number)
            for number in range(num_outputs)
        ]
        self.worker.submit(
            Subscriber(self.engine, requests, self._take, self.loop, interval=self.INTERVAL)
        )
        assert self.worker._next_jobs()
        (self.running,) = self.worker._running.values()

    def _take(self, steps: list[Step | Exception]) -> None:
        for step in steps:
            assert isinstance(step, Step)
            assert sum(done.emitted for done in step.done) == len(step.event.token_ids)
            self.taken.append(step)

    def step(self) -> None:
        self.worker._step_all()

    def tokens(self, output: int = 0) -> list[int]:
        of_output = [step for step in self.taken if step.output == output]
        return [token for step in of_output for token in step.event.token_ids]

    def whole(self, output: int = 0) -> list[int]:
        result = tiny_engine().generate("def f(x):", self.sampling, request_numbers=[output])
        return list(result.token_ids)


def test_held_rounds_are_sent_when_they_are_due_without_another_round() -> None:
    stream = Stream()
    for _ in range(3):
        stream.step()
    assert [len(step.done) for step in stream.taken] == [1]
    stream.loop.wait(0.019)
    assert len(stream.taken) == 1
    stream.loop.wait(0.001)
    assert [len(step.done) for step in stream.taken] == [1, 2]
    stream.step()
    assert len(stream.taken) == 2, "an interval begins with each chunk"
    stream.loop.wait(0.02)
    assert [len(step.done) for step in stream.taken] == [1, 2, 1]


def test_held_rounds_are_sent_during_a_long_step() -> None:
    """As while another request's prompt is read."""
    stream = Stream()
    stream.step()
    stream.step()
    run = stream.running.scheduler.step

    def long() -> Any:
        stream.loop.wait(0.02)
        assert len(stream.taken) == 2, "sent before the step has ended"
        return run()

    stream.running.scheduler.step = long  # type: ignore[method-assign]
    stream.step()
    assert stream.tokens() == stream.whole()[: len(stream.tokens())]


def test_a_round_that_has_ended_is_sent_as_soon_as_it_is_noted() -> None:
    """The interval ends between a round and its note, when the output has tokens that no note has;
    text, tokens and rounds stay together."""
    stream = Stream()
    run = stream.running.scheduler.step

    def ending() -> Any:
        progress = run()
        before = len(stream.taken)
        stream.loop.wait(0.02)
        assert len(stream.taken) == before
        return progress

    stream.step()
    stream.running.scheduler.step = ending  # type: ignore[method-assign]
    stream.step()
    assert [len(step.done) for step in stream.taken] == [1, 1]


def test_a_round_after_a_quiet_interval_is_sent_at_once() -> None:
    stream = Stream()
    stream.step()
    stream.loop.wait(0.02)
    assert len(stream.taken) == 1
    stream.step()
    assert len(stream.taken) == 2


@pytest.mark.parametrize("pause", [0.0, 0.003, 0.01, 0.05])
def test_nothing_is_lost_or_repeated(pause: float) -> None:
    """Two outputs of one subscriber, with rounds of any length."""
    stream = Stream(num_outputs=2)
    while stream.running.outputs:
        stream.step()
        stream.loop.wait(pause)
    for output in (0, 1):
        assert stream.tokens(output) == stream.whole(output)
        ends = [step.over for step in stream.taken if step.output == output]
        assert ends == [False] * (len(ends) - 1) + [True]


def test_a_timer_of_an_earlier_request_takes_nothing_of_a_later_one() -> None:
    """Request ids of an engine begin anew once it was idle."""
    stream = Stream()
    while stream.running.outputs:
        stream.step()
    num_taken = len(stream.taken)
    later: list[Any] = []
    request = stream.engine.request("def f(x):", stream.sampling)
    stream.worker.submit(
        Subscriber(stream.engine, [request], later.extend, stream.loop, interval=3600)
    )
    assert stream.worker._next_jobs()
    stream.step()
    stream.step()
    stream.loop.wait(0.02)
    assert (len(stream.taken), len(later)) == (num_taken, 1)
