"""Engines used from several threads: every request has the same output as alone."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import Any

import pytest
import torch
from real_tokenizers import worded
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids
from tiny_ngrams import tiny_file
from tiny_seq2seq import tiny_seq2seq
from torch import Tensor
from torch.export import ExportedProgram

from outrider import Engine, Sampling
from outrider.core.clock import Stopwatch
from outrider.core.errors import NonFiniteLogitsError
from outrider.runtime.executors.compile_cache import Program
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.traced import TreeForward

TARGET, DRAFT = worded(0), worded(3)
SAMPLING = Sampling(temperature=0.9, max_new_tokens=6, ignore_eos=True)
OPTIONS: dict[str, dict[str, Any]] = {"ngram": {"file": tiny_file()}}
BATCHES = [ragged_prompts([n] * rows, seed=n) for n, rows in ((5, 1), (2, 3))]
METHODS = (
    "plain",
    "speculative",
    "specinfer",
    "dynamic-tree",
    "mtad",
    "prompt-lookup",
    "suffix",
    "ngram",
    "tli",
    "staged",
    "early-exit",
    "hybrid",
)

Texts = list[tuple[int, ...]]
Call = Callable[[], Texts]


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    """Makes the interpreter switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def engine(method: str, **settings: Any) -> Engine:
    return engine_of(TARGET, DRAFT, method, 3, options=OPTIONS.get(method), **settings)


def all_at_once(calls: Sequence[Call]) -> list[Texts]:
    """The result of each call, each in its own thread, all started together."""
    barrier = Barrier(len(calls))

    def begin(call: Call) -> Texts:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(begin, calls))


def generating(engine: Engine, prompts: list[list[int]], sampling: Sampling = SAMPLING) -> Call:
    return lambda: token_ids(engine.generate(prompts, sampling))


def streaming(engine: Engine, prompts: list[list[int]], sampling: Sampling = SAMPLING) -> Call:
    def call() -> Texts:
        events = [list(engine.stream(prompt, sampling)) for prompt in prompts]
        return [tuple(x for event in each for x in event.token_ids) for each in events]

    return call


@pytest.mark.parametrize("method", METHODS)
def test_one_engine_in_many_threads(method: str) -> None:
    """Batches of several sizes and streams; a mix-up would give an error or a different output."""
    alone = [generating(engine(method), prompts)() for prompts in BATCHES]
    shared = engine(method)
    calls = [generating(shared, prompts) for prompts in BATCHES]
    calls.append(streaming(shared, BATCHES[0]))
    assert all_at_once(calls) == [*alone, alone[0]]


def test_engines_that_share_models() -> None:
    """One thread per method, all on the same two models, each with its own engine."""
    prompts = BATCHES[1]
    alone = [generating(engine(method), prompts)() for method in METHODS]
    assert all_at_once([generating(engine(method), prompts) for method in METHODS]) == alone


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders(family: str) -> None:
    target, draft = tiny_seq2seq(family), tiny_seq2seq(family, 1)
    alone = [generating(engine_of(target, draft), prompts)() for prompts in BATCHES]
    shared = engine_of(target, draft)
    own = [engine_of(target, draft) for _ in BATCHES]
    calls = [generating(shared, prompts) for prompts in BATCHES]
    calls += [generating(*pair) for pair in zip(own, BATCHES, strict=True)]
    assert all_at_once(calls) == 2 * alone


def test_a_graph_runs_one_forward_pass_at_a_time() -> None:
    """A graph has a single output buffer. Two engines share the model, and so its graph."""
    running = Lock()

    def alone_in(each: TreeForward, trace: Callable[[], ExportedProgram]) -> Program:
        def graph(inputs: list[Tensor]) -> list[Tensor]:
            assert running.acquire(blocking=False), "two passes at once"
            buffers = inputs[each.num_moving :]
            half = len(buffers) // 2
            done = each(*inputs[: each.num_moving], buffers[:half], buffers[half:])
            running.release()
            return list(done)

        return graph

    model, draft = tiny(), tiny(seed=1)
    alone = [generating(engine_of(model, draft), prompts)() for prompts in BATCHES]
    shared, other = engine_of(model, draft), engine_of(model, draft)
    model.compiled = CompiledExecutor(model.module, model.spec, "graph", alone_in)
    calls = [generating(each, prompts) for each in (shared, other) for prompts in BATCHES]
    assert all_at_once(calls) == 2 * alone


def test_a_stopwatch_counts_the_seconds_of_its_own_thread() -> None:
    watch = Stopwatch()
    with watch, ThreadPoolExecutor(1) as pool:
        pool.submit(watch.__enter__).result()
        assert pool.submit(watch.seconds).result() == 0
    assert watch.seconds() > 0


def test_a_damaged_request_fails_alone() -> None:
    """The model's logits are NaN after one token. Only requests that contain the token fail."""
    model = tiny()
    with torch.no_grad():
        model.module.get_input_embeddings().weight[7] = torch.nan
    shared = engine_of(model, tiny(seed=1))
    healthy = [[[1, 2, 3]], [[4, 5], [6, 8]]]
    forced = (9, 10, 11, 12)
    sampling = greedy(4, forced=dict(enumerate(forced)))

    def failing() -> Texts:
        with pytest.raises(NonFiniteLogitsError, match="position 2"):
            shared.generate([[1, 2, 7]], sampling)
        return []

    calls = [generating(shared, prompts, sampling) for prompts in healthy]
    texts = all_at_once([failing, calls[0], failing, calls[1], failing])
    assert texts == [[], [forced], [], [forced, forced], []]


def test_a_stream_that_is_not_read_blocks_no_other_request() -> None:
    shared = engine("speculative")
    abandoned = shared.stream(BATCHES[0][0], SAMPLING)
    next(abandoned)
    alone = generating(engine("speculative"), BATCHES[1])()
    assert all_at_once([generating(shared, BATCHES[1])] * 2) == [alone, alone]
    assert next(abandoned).token_ids


def test_a_processor_may_use_the_engine_itself() -> None:
    """A call inside a round of the same engine and thread does not deadlock."""
    shared = engine("speculative")
    wanted = generating(shared, BATCHES[0])()
    found: list[Texts] = []

    def processor(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if not found:
            found.append([])
            found[0] = generating(shared, BATCHES[0])()
        return logits

    shared.generate([[1, 2]], Sampling(max_new_tokens=2, processors=(processor,)))
    assert found == [wanted]
