"""A second process follows the scheduling decisions of rank 0, and emits the same tokens.

This is how ranks of a sharded target stay together: rank 0 alone takes requests, and sends every
``add``, ``abort`` and ``step`` to the others, which replay them on schedulers of their own. A step
depends on nothing else, so each rank has the same rows in the same order in every round. Rank 0
also sends what each step emitted, which the follower compares at once.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny

from outrider import Engine, Sampling
from outrider.engine import Progress, Request, Scheduler

Emitted = list[tuple[int, list[int], str | None, str | None]]
"""Of each request in a step: its id, its tokens so far, its finish reason and its error."""

PROMPTS = ragged_prompts([9, 600, 17, 4, 30, 2, 8, 5])
DAMAGED = 7


def build() -> Engine:
    """The engine that every rank builds: a damaged target, so that requests may fail, and a rule
    that verifies greedy and sampled requests apart."""
    settings: dict[str, Any] = {"dtype": torch.float64, "max_position_embeddings": 1024}
    target, draft = tiny(std=0.2, **settings), tiny(std=0.18, **settings)
    with torch.no_grad():
        target.module.get_input_embeddings().weight[DAMAGED] = torch.nan
    return engine_of(target, draft, "relaxed", max_batch_size=3)


def emitted(progress: list[Progress]) -> Emitted:
    return [
        (each.request_id, list(each.row.token_ids), each.row.ending.reason, repr(each.row.error))
        for each in progress
    ]


class Leader:
    """Rank 0's scheduler; a follower hears of each call before it is made."""

    def __init__(self, scheduler: Scheduler, follower: Connection) -> None:
        self._scheduler = scheduler
        self._follower = follower

    def add(self, request: Request) -> int:
        self._follower.send(("add", request))
        return self._scheduler.add(request)

    def abort(self, request_id: int) -> None:
        self._follower.send(("abort", request_id))
        self._scheduler.abort(request_id)

    def step(self) -> Emitted:
        self._follower.send(("step", None))
        done = emitted(self._scheduler.step())
        self._follower.send(done)
        return done


def follow(leader: Connection) -> None:
    """What the second process does: replays the leader's calls; sends back all that it emitted, or
    the first step in which it differs."""
    scheduler = build().new_scheduler()
    calls: dict[str, Callable[[Any], object]] = {"add": scheduler.add, "abort": scheduler.abort}
    steps: list[Emitted] = []
    while (call := leader.recv()) is not None:
        name, argument = call
        if name in calls:
            calls[name](argument)
            continue
        steps.append(emitted(scheduler.step()))
        theirs = leader.recv()
        if steps[-1] != theirs:
            leader.send(f"step {len(steps)}: {steps[-1]} instead of {theirs}")
            return
    leader.send(steps)


def test_a_second_process_follows_rank_0() -> None:
    """Requests arrive in the middle, one is aborted, one fails, one has a long prompt that is
    prefilled between rounds, and greedy and sampled ones run in batches of their own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    follower = context.Process(target=follow, args=(theirs,), daemon=True)
    follower.start()
    engine = build()
    leader = Leader(engine.new_scheduler(), ours)
    never = {DAMAGED: -1e9}
    samplings = [
        greedy(20, logit_bias=never),
        Sampling(temperature=0.9, max_new_tokens=24, seed=3, logit_bias=never),
    ]

    def request(number: int, prompt: list[int] | None = None) -> Request:
        prompt = prompt or [token if token != DAMAGED else 8 for token in PROMPTS[number]]
        return engine.request(prompt, samplings[number % 2], request_number=number)

    steps: list[Emitted] = []
    ids = [leader.add(request(number)) for number in (0, 2, 3)]
    steps += [leader.step() for _ in range(2)]
    ids += [leader.add(request(number)) for number in (1, 4, 5)]
    steps.append(leader.step())
    leader.abort(ids[1])
    failing = leader.add(request(7, [1, 2, DAMAGED]))
    ids.append(leader.add(request(6)))
    while steps[-1]:
        steps.append(leader.step())
    ours.send(None)
    assert ours.poll(300), "the follower does not answer"
    assert ours.recv() == steps
    follower.join()

    last = {request_id: rest for step in steps for request_id, *rest in step}
    assert set(last) == {*ids, failing}
    assert "NaN" in last[failing][2]
    over = [request_id for request_id in ids if request_id != ids[1]]
    assert all(last[request_id][1] == "length" for request_id in over)
    assert last[ids[1]][1] is None
