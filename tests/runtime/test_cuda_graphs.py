"""Recorded passes say what unrecorded ones say, look at no number, and keep nothing of the last.

Without a GPU: the recorder is a tape of operators (``outrider.testing``), the graphs are the traced
programs, run by torch.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from interpreted_graphs import interpreted, without_compiler
from operator_tape import record_on_tape
from tiny_models import engine_of, greedy, ragged_prompts, tiny, tiny_module, token_ids
from torch import Tensor
from torch.export import ExportedProgram

from outrider import Sampling
from outrider.core.errors import OutriderWarning
from outrider.runtime import HFModel
from outrider.runtime.executors import prepare
from outrider.runtime.executors.compile_cache import Program
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.cuda_graphs import (
    CudaRecorder,
    GraphedProgram,
    Recorder,
    graphed,
    rounded_span,
)
from outrider.runtime.executors.traced import TreeForward

SAMPLED = Sampling(temperature=0.9, seed=3, max_new_tokens=30, ignore_eos=True)


class Recording:
    """Makes graphs that are recorded on tapes, and keeps them."""

    def __init__(self, record: Recorder = record_on_tape) -> None:
        self.graphs: list[GraphedProgram] = []
        self.record = record

    def __call__(self, module: TreeForward, trace: Callable[[], ExportedProgram]) -> Program:
        graph = graphed(module, trace, make=interpreted, record=self.record)
        assert isinstance(graph, GraphedProgram)
        self.graphs.append(graph)
        return graph

    def give(self, model: HFModel) -> HFModel:
        """The model, with graphs."""
        model.compiled = CompiledExecutor(model.module, model.spec, "graph", self, rounded_span)
        return model


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [greedy(30), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "speculative"), ("llama", "top-k-tree"), ("gemma3", "speculative")],
)
def test_recorded_graphs_write_the_same_text(family: str, method: str, sampling: Sampling) -> None:
    """Chains, fused drafts and trees, windows and none, ragged rows that leave, KV buffers that
    grow."""
    γ = 2 if family == "gemma3" else 4  # each layer of each drafted token is traced
    prompts, texts, recording = ragged_prompts([9, 3, 14, 60]), [], Recording()
    plain, taped = (lambda model: model), recording.give
    for give in (plain, taped):
        engine = engine_of(give(tiny(family)), give(tiny(family, 1)), method, γ, max_batch_size=3)
        texts.append(token_ids(without_compiler(engine).generate(prompts, sampling)))
    assert texts[0] == texts[1]
    assert sum(graph.num_captures for graph in recording.graphs) > 3


def doubling(calls: list[int]) -> Program:
    """Writes twice what it is given to its KV buffer, and gives back three times that."""

    def graph(inputs: list[Tensor]) -> list[Tensor]:
        calls.append(1)
        x_N, buffer_S = inputs
        buffer_S[: x_N.shape[0]] = 2 * x_N
        return [3 * buffer_S[: x_N.shape[0]]]

    return graph


def numbers(*values: float) -> Tensor:
    return torch.tensor(values)


def test_the_first_run_is_plain_the_second_is_recorded_the_others_are_replayed() -> None:
    calls: list[int] = []
    graph, buffer_S = GraphedProgram(doubling(calls), 1, record_on_tape, "toy"), torch.zeros(4)
    kept = []
    for round_, calls_so_far in ((1, 1), (2, 2), (3, 2), (4, 2)):
        x_N = numbers(round_, -round_)  # elsewhere in memory every time
        kept.append(graph([x_N, buffer_S])[0])
        assert buffer_S.tolist() == [2 * round_, -2 * round_, 0, 0]
        assert len(calls) == calls_so_far
    assert [each.tolist() for each in kept] == [
        [6 * round_, -6 * round_] for round_ in (1, 2, 3, 4)
    ]
    assert graph.num_captures == 1


def test_other_sizes_and_other_buffers_have_recordings_of_their_own() -> None:
    graph = GraphedProgram(doubling([]), 1, record_on_tape, "toy")
    buffers = [torch.zeros(4), torch.zeros(4), torch.zeros(8)]
    inputs = [numbers(1.0), numbers(1.0, 2.0), numbers(1.0, 2.0).double()]
    for round_ in range(3):
        for buffer_S in buffers:
            for x_N in inputs:
                wanted = 6 * (x_N + round_)
                assert torch.equal(graph([x_N + round_, buffer_S])[0], wanted.float())
                assert torch.equal(buffer_S[: x_N.shape[0]], wanted.float() / 3)
    assert graph.num_captures == 9


def test_the_oldest_recordings_are_let_go() -> None:
    graph, buffer_S = GraphedProgram(doubling([]), 1, record_on_tape, "toy"), torch.zeros(200)
    for num in range(1, 100):
        for _ in range(2):
            assert torch.equal(graph([torch.ones(num), buffer_S])[0], torch.full((num,), 6.0))
    assert graph.num_captures <= 32
    assert torch.equal(graph([torch.ones(1), buffer_S])[0], numbers(6.0))


def test_what_cannot_be_recorded_goes_on_after_one_warning() -> None:
    def looks(inputs: list[Tensor]) -> list[Tensor]:
        return [inputs[0] * int(inputs[0].sum())]

    graph = GraphedProgram(looks, 1, record_on_tape, "toy")
    assert graph([numbers(1.0, 2.0)])[0].tolist() == [3, 6]
    with pytest.warns(OutriderWarning, match="toy has no CUDA graph.*reads a value on the host"):
        assert graph([numbers(1.0, 3.0)])[0].tolist() == [4, 12]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graph([numbers(2.0, 3.0)])[0].tolist() == [10, 15]
        assert graph([numbers(2.0)])[0].tolist() == [4]


def test_spans_are_few_and_never_a_quarter_too_long() -> None:
    spans = [rounded_span(span, 2**20) for span in range(1, 4097)]
    assert all(span <= read < max(65, 1.25 * span) for span, read in enumerate(spans, 1))
    assert spans == sorted(spans)
    assert len(set(spans)) == 1 + 4 * 6
    assert [rounded_span(span, 70) for span in (3, 64, 65, 70)] == [64, 64, 70, 70]


def test_a_whole_draft_is_one_recording_and_looks_at_nothing() -> None:
    """γ passes with their draws are launched at once, at temperature 0 and above."""
    launched: list[int] = []

    def counting(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        replay, results = record_on_tape(run)

        def launch() -> None:
            launched.append(1)
            replay()

        return launch, results

    recording = Recording(counting)
    draft = recording.give(tiny(seed=1))
    engine = engine_of(tiny(), draft, "speculative")
    for sampling in (greedy(40), SAMPLED):
        launched.clear()
        stats = engine.generate(ragged_prompts([5]), sampling)[0].stats
        assert stats.rounds - 4 <= len(launched) <= stats.rounds  # the first of each size is not


def test_models_on_cuda_are_recorded_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "use_kernels", lambda *_, **__: None)
    monkeypatch.setattr(
        prepare, "compiled_program", lambda module, trace, **_: interpreted(module, trace)
    )
    monkeypatch.setattr(CudaRecorder, "__call__", lambda self, run: record_on_tape(run))
    wanted = token_ids(engine_of(tiny()).generate(ragged_prompts([5]), greedy(9)))
    for device, are_recorded in (("cuda", True), ("cpu", False)):
        model = tiny()
        monkeypatch.setattr(model, "device", torch.device(device))
        prepare.prepare(model, "auto")
        monkeypatch.setattr(model, "device", torch.device("cpu"))
        engine = engine_of(model)
        assert token_ids(engine.generate(ragged_prompts([5]), greedy(9))) == wanted
        graphs = list(model.compiled._programs.values())  # type: ignore[union-attr]
        assert [isinstance(graph, GraphedProgram) for graph in graphs] == [are_recorded]


def test_the_recorder_records_as_cuda_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pool, on the model's device, whatever other threads allocate meanwhile."""
    signature = inspect.signature(torch.cuda.graph.__init__)
    events: list[Any] = []

    class Graph:
        def replay(self) -> None:
            events.append("replayed")

    @contextmanager
    def capture(*arguments: Any, **settings: Any) -> Iterator[None]:
        bound = signature.bind(None, *arguments, **settings).arguments
        events.append((bound["pool"], bound["capture_error_mode"]))
        yield
        events.append("captured")

    pools = iter([(7, 0), (8, 0)])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(events.append(device)))
    record, device = CudaRecorder(torch.device("cuda:1")), torch.device("cuda:1")
    for _ in range(2):
        replay, results = record(lambda: events.append("run") or [numbers(1.0)])  # type: ignore[func-returns-value]
        assert results[0].tolist() == [1]
        replay()
    once = [device, ((7, 0), "thread_local"), "run", "captured", "replayed"]
    assert events == 2 * once


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.slow
@pytest.mark.parametrize("sampling", [greedy(30), SAMPLED], ids=["greedy", "sampled"])
def test_a_gpu_writes_the_same_text_with_recorded_graphs(sampling: Sampling) -> None:
    texts = []
    for mode in ("off", "auto"):
        models = [HFModel(tiny_module("llama", seed).cuda().float()) for seed in (0, 1)]
        for model in models:
            prepare.prepare(model, mode)
        engine = engine_of(*models)
        texts.append(token_ids(engine.generate(ragged_prompts([9, 3]), sampling)))
    assert texts[0] == texts[1]
    graphs = models[0].compiled._programs.values()  # type: ignore[union-attr]
    assert all(isinstance(graph, GraphedProgram) and graph.num_captures for graph in graphs)
