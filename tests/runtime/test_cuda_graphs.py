"""Recorded passes say what unrecorded ones say, look at no number, and keep nothing of the last.

Without a GPU: the recorder is a tape of operators (``operator_tape.py``), the graphs are models'
own code, or traced programs, run by torch.
"""

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from interpreted_graphs import interpreted, without_compiler
from operator_tape import Tape, record_on_tape
from real_tokenizers import worded
from tiny_models import engine_of, greedy, ragged_prompts, tiny, tiny_module, token_ids
from tiny_ngrams import tiny_file
from torch import Tensor
from torch.export import ExportedProgram

from outrider import Engine, Sampling
from outrider.core import Draft, Drawn, Stream, Verifier, at_node, race, repeat_while, row_keys
from outrider.core.chain import cached_arange
from outrider.core.errors import OutriderWarning
from outrider.core.overlap import overlap_down
from outrider.core.recording import capturing
from outrider.core.repeat import apply_if
from outrider.core.tree import _cached_tree_tensors, tree_tensors
from outrider.drafters.heads.fused_draft import HeadExecutor
from outrider.drafters.heads.head_model import HeadModel
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.runtime.executors import cuda_graphs, prepare
from outrider.runtime.executors.compile_cache import Program
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.cuda_graphs import (
    CudaRecorder,
    GraphedProgram,
    Recorder,
    graphed,
    graphed_rule,
    rounded_span,
)
from outrider.runtime.executors.fused_verification import CompiledVerifier
from outrider.runtime.executors.traced import TreeForward
from outrider.runtime.executors.verification_program import GivenNumbers
from outrider.runtime.kv_cache.buffer_pool import BufferPool
from outrider.verifiers import Rejection
from outrider.verifiers.mentored import Mentored
from outrider.verifiers.spectr import Spectr

SAMPLED = Sampling(temperature=0.9, seed=3, max_new_tokens=20, ignore_eos=True)
SHORT = replace(SAMPLED, max_new_tokens=14)


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
    grow. Each layer of each drafted token is traced, so there are few of both."""
    layers: dict[str, Any] = {"num_hidden_layers": 1}
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        layers = {"num_hidden_layers": 2, "layer_types": kinds}
    γ = 4 if method == "top-k-tree" else 2
    prompts, texts, recording = ragged_prompts([9, 3, 14, 60]), [], Recording()
    plain, taped = (lambda model: model), recording.give
    for give in (plain, taped):
        target, draft = (give(tiny(family, seed, **layers)) for seed in (0, 1))
        engine = engine_of(target, draft, method, γ, max_batch_size=3)
        texts.append(token_ids(without_compiler(engine).generate(prompts, sampling)))
    assert texts[0] == texts[1]
    assert sum(graph.num_captures for graph in recording.graphs) > 3


def test_later_requests_replay_the_captures_of_earlier_ones() -> None:
    """Since their KV buffers have the same addresses."""
    recording, models = Recording(), [tiny("llama"), tiny("llama", 1)]
    for model in models:
        model.plan = replace(model.plan, pool=BufferPool(2**30))
    engine = engine_of(*map(recording.give, models), "speculative", 3)
    counts, texts = [], []
    for _ in range(3):
        texts.append(token_ids(without_compiler(engine).generate(ragged_prompts([9]), greedy(30))))
        counts.append(sum(graph.num_captures for graph in recording.graphs))
    assert texts[0] == texts[1] == texts[2]
    assert 0 < counts[1] == counts[2]


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
    graph, buffer_S = GraphedProgram(doubling([]), 1, record_on_tape, "toy"), torch.zeros(400)
    for num in range(1, 300):
        for _ in range(2):
            assert torch.equal(graph([torch.ones(num), buffer_S])[0], torch.full((num,), 6.0))
    assert graph.num_captures <= 128
    assert torch.equal(graph([torch.ones(1), buffer_S])[0], numbers(6.0))


def test_captures_hold_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are let go, and inputs that would take an eighth of it are not captured."""
    monkeypatch.setattr(cuda_graphs, "_MOST_BYTES", 1024)
    graph, buffer_S = GraphedProgram(doubling([]), 1, record_on_tape, "toy"), torch.zeros(64)
    for num in (*range(20, 60), 3):
        for _ in range(3):
            assert torch.equal(graph([torch.ones(num), buffer_S])[0], torch.full((num,), 6.0))
        held = sum(capture.num_bytes for capture in graph._captures.values() if capture)
        assert held == graph._num_bytes <= 1024
        if num > 32:
            assert not list(graph._captures.values())[-1]
    assert graph.num_captures > 1


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
    assert all(span <= read < max(257, 1.25 * span) for span, read in enumerate(spans, 1))
    assert spans == sorted(spans)
    assert len(set(spans)) == 1 + 4 * 4
    assert [rounded_span(span, 270) for span in (3, 256, 257, 270)] == [256, 256, 270, 270]
    assert [rounded_span(span, 70) for span in (3, 70)] == [70, 70]


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


@pytest.mark.parametrize("compile", ["auto", "max"])
def test_models_on_cuda_are_recorded_and_others_are_not(
    compile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``auto`` their own code, by ``max`` their compiled programs."""
    compiled: list[bool] = []

    def compile_it(module: TreeForward, trace: Callable[[], ExportedProgram], **_: Any) -> Program:
        compiled.append(True)
        return interpreted(module, trace)

    monkeypatch.setattr(prepare, "use_kernels", lambda *_, **__: None)
    monkeypatch.setattr(prepare, "compiled_program", compile_it)
    monkeypatch.setattr(CudaRecorder, "__call__", lambda self, run: record_on_tape(run))
    wanted = token_ids(engine_of(tiny()).generate(ragged_prompts([5]), greedy(9)))
    for device, are_recorded in (("cuda", True), ("cpu", False)):
        compiled.clear()
        model = tiny()
        monkeypatch.setattr(model, "device", torch.device(device))
        prepare.prepare(model, compile)
        monkeypatch.setattr(model, "device", torch.device("cpu"))
        engine = engine_of(model)
        assert token_ids(engine.generate(ragged_prompts([5]), greedy(9))) == wanted
        graphs = list(model.compiled._programs.values())  # type: ignore[union-attr]
        assert [isinstance(graph, GraphedProgram) for graph in graphs] == [are_recorded]
        assert compiled == [True] * (compile == "max" or device == "cpu")


def captured_on_tape(engine: Engine) -> list[GraphedProgram]:
    """Lets an engine run by its models' and its rules' own code, captured; returns the programs,
    which are added as they are made."""
    made: list[GraphedProgram] = []

    def passes(module: TreeForward, trace: Callable[[], ExportedProgram]) -> Program:
        made.append(graphed(module, trace, record=record_on_tape))  # type: ignore[arg-type]
        return made[-1]

    def rules(module: Any, trace: Callable[[], ExportedProgram], own: bool) -> Program:
        made.append(graphed_rule(module, trace, own, record=record_on_tape))  # type: ignore[arg-type]
        return made[-1]

    check = lambda *_, **__: ""  # noqa: E731
    for model in dict.fromkeys((engine.target, *engine.drafter.capabilities.models)):
        kind = HeadExecutor if isinstance(model, HeadModel) else CompiledExecutor
        recording = None if isinstance(model, HeadModel) else model.eager.recording
        model.compiled = kind(
            model.module, model.spec, "m", passes, rounded_span, recording=recording, check=check
        )
    shape = engine.drafter.capabilities.tree_shape
    engine.verification = CompiledVerifier(rules, shape, check=check)
    return made


def case_of(method: str) -> tuple[dict[str, Any], list[Sampling], list[list[int]]]:
    """Options, sampling parameters and prompts to compare two engines of a method with."""
    options = {"ngram": {"file": tiny_file()}, "bild": {"mode": "mjsd"}}.get(method, {})
    samplings = [greedy(10)] + [SHORT] * (not METHODS[method].recipe().greedy_only)
    return options, samplings, ragged_prompts([9, 3, 14])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_the_same_text_by_captured_code(method: str) -> None:
    """Rows of several lengths that leave the batch, greedy and sampled."""
    options, samplings, prompts = case_of(method)
    texts, made = [], list[GraphedProgram]()
    for captured in (False, True):
        engine = engine_of(worded(0), worded(3), method, 3, options=options, max_batch_size=2)
        if captured:
            made = captured_on_tape(engine)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            texts.append([token_ids(engine.generate(prompts, each)) for each in samplings])
    assert texts[0] == texts[1]
    assert sum(graph.num_captures for graph in made) > 1


@pytest.mark.parametrize(
    "method",
    ["specinfer", "sequoia", "spectr", "top-k-tree", "traversal", "eagle3-tree", "mjsd", "mtad"],
)
def test_rules_for_trees_and_searches_decide_the_same_when_captured(method: str) -> None:
    texts, made = [], list[GraphedProgram]()
    for captured in (False, True):
        engine = engine_of(tiny(num_hidden_layers=3), tiny(seed=1), method, 8, max_batch_size=2)
        if captured:
            made = captured_on_tape(engine)
        prompts = ragged_prompts([9, 3, 14])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            texts.append(
                [token_ids(engine.generate(prompts, each)) for each in (greedy(14), SHORT)]
            )
    assert texts[0] == texts[1]
    assert engine.verification is not None
    sampled = [
        p for (rule, *_), p in engine.verification._programs.items() if rule.needs != "argmax"
    ]
    assert all(isinstance(program, GraphedProgram) and program.num_captures for program in sampled)
    assert sampled
    assert made


def decided(rule: Verifier, parents: tuple[int, ...], *, is_chosen: bool = False) -> Program:
    """A rule as a program: of a chain, or of a tree with these parents of its nodes."""
    is_chain, N = parents == tuple(range(-1, len(parents) - 1)), len(parents)
    none_BN, all_BN = torch.zeros(1, N, dtype=torch.int64), torch.ones(1, N, dtype=torch.bool)
    tree = Draft.tree(parents, none_BN, all_BN, None, "chosen")
    longest = int(tree.walk_step_BN.max())
    drawn: Drawn = "chosen" if is_chosen else "iid"

    def decide(inputs: list[Tensor]) -> list[Tensor]:
        tokens_BN, mask_BN, p_BNV, q_BNV, accept_BN, next_BN = inputs
        probs_BNV = None if is_chosen else q_BNV
        draft = Draft.chain(tokens_BN, mask_BN, probs_BNV, drawn)
        if not is_chain:
            draft = Draft.tree(parents, tokens_BN, mask_BN, probs_BNV, drawn, longest)
        rng = GivenNumbers.of([tokens_BN[:, 0]] * 2, accept_BN, next_BN)
        verdict = rule(draft, p_BNV, rng)
        return [verdict.num_accepted_B, verdict.next_token_B, verdict.path_BD]

    return decide


def drafts(parents: tuple[int, ...], V: int, seed: int, *, is_chosen: bool) -> list[Tensor]:
    """Inputs of such a program: ragged rows, of distributions that are far apart or close. Chosen
    tokens are likely ones."""
    generator, B, N = torch.Generator().manual_seed(seed), 4, len(parents)
    z_2BNV = torch.randn(2, B, N, V, generator=generator)
    z_2BNV[1] = z_2BNV[0] + 3 ** -(seed % 4) * z_2BNV[1]
    p_BNV, q_BNV = z_2BNV.softmax(-1)
    if seed % 2:
        p_BNV = torch.where(p_BNV < 1 / V, 0.0, p_BNV)
    above_D = torch.tensor(parents[1:])
    drawn_BD = q_BNV[:, above_D].flatten(0, 1).multinomial(1, generator=generator).view(B, -1)
    tokens_BN = torch.nn.functional.pad(drawn_BD, (1, 0))
    for child, above in enumerate(parents[1:], 1):
        if is_chosen:
            p_BNV[:, above].scatter_(1, tokens_BN[:, child, None], 0.5)
    p_BNV = p_BNV / p_BNV.sum(-1, keepdim=True)
    mask_BN = torch.arange(N) < torch.randint(1, N + 1, (B, 1), generator=generator)
    mask_BN[0] = True
    numbers_2BN = torch.rand(2, B, N, generator=generator, dtype=torch.float64)
    return [tokens_BN, mask_BN, p_BNV, q_BNV, *numbers_2BN]


CHAIN, TREE = (-1, 0, 1, 2, 3), (-1, 0, 0, 1, 1, 2, 3, 6)
SEQUENCES = (-1, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
LOOPS = {
    "mentored": (Mentored(0.1), CHAIN, 30),
    "mentored, KL(π‖p)": (Mentored(0.1, "rkl"), CHAIN, 30),
    "mentored, TV": (Mentored(0.05, "tv"), CHAIN, 30),
    "mentored, χ²": (Mentored(0.1, "chi2"), CHAIN, 1500),
    "mentored, off the support": (Mentored(0.1, allow_off_support=True), CHAIN, 1500),
    "mentored, the author's bracket": (Mentored(0.1, bracket="blog"), CHAIN, 30),
    "mentored, a large vocabulary": (Mentored(0.1), CHAIN, 9000),
    "sequences": (Spectr(), SEQUENCES, 30),
    "one sequence": (Spectr(), CHAIN, 30),
    "a walk": (Rejection(), TREE, 30),
    "a walk, a large vocabulary": (Rejection(), TREE, 5000),
}


@pytest.mark.parametrize(
    ("case", "is_chosen"),
    [(case, False) for case in LOOPS]
    + [(case, True) for case, (rule, *_) in LOOPS.items() if "chosen" in rule.accepts],
)
def test_loops_decide_the_same_when_captured(case: str, is_chosen: bool) -> None:
    """On other numbers than those of the capture, in at most 1,600 operators that compute."""
    rule, parents, V = LOOPS[case]
    program, operators = decided(rule, parents, is_chosen=is_chosen), list[int]()

    def counting(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        with Tape() as tape:
            results = run()
        operators.append(tape.num_computing)
        return tape.replay, results

    graph, accepted = GraphedProgram(program, None, counting, case), set[int]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(24 if V < 1000 else 8):
            inputs = drafts(parents, V, seed, is_chosen=is_chosen)
            expected = program(inputs)
            for found, wanted in zip(graph(inputs), expected, strict=True):
                assert torch.equal(found, wanted)
            accepted.update(expected[0].tolist())
    assert graph.num_captures == len(operators) == 1
    assert operators[0] <= 1600
    assert len(accepted) > 2


def test_the_overlap_down_a_tree_is_captured() -> None:
    def overlap(inputs: list[Tensor]) -> list[Tensor]:
        tokens_BN, mask_BN, p_BNV, q_BNV, *_ = inputs
        draft = Draft.tree(TREE, tokens_BN, mask_BN, q_BNV, "iid")
        return list(overlap_down(draft, partial(at_node, p_BNV)))

    graph = GraphedProgram(overlap, None, record_on_tape, "toy")
    for seed in range(12):
        inputs = drafts(TREE, 30, seed, is_chosen=False)
        for found, wanted in zip(graph(inputs), overlap(inputs), strict=True):
            assert torch.equal(found, wanted)
    assert graph.num_captures == 1


def test_a_race_is_captured() -> None:
    """Of more tokens than it opens at first, and of weights for which it opens all."""

    def raced(inputs: list[Tensor]) -> list[Tensor]:
        return [race(inputs[0], Stream(inputs[1], inputs[1]))]

    graph = GraphedProgram(raced, None, record_on_tape, "toy")
    for seed in range(6):
        weights_BV = torch.randn(3, 5000).exp() * (seed % 3 > 0)
        inputs = [weights_BV, row_keys([seed] * 3, [0, 1, 2], "cpu")]
        assert torch.equal(graph(inputs)[0], raced(inputs)[0])
    assert graph.num_captures == 1


def test_a_loop_of_unknown_length_is_not_captured() -> None:
    """The program goes on as it is, without a warning."""
    calls: list[int] = []

    def halved(inputs: list[Tensor]) -> list[Tensor]:
        calls.append(1)
        return list(repeat_while(lambda x: (x > 1).any(), lambda x: (x / 2,), (inputs[0],)))

    graph = GraphedProgram(halved, None, record_on_tape, "toy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for round_ in range(1, 4):
            assert graph([numbers(8.0 * round_)])[0].tolist() == [(1, 1, 0.75)[round_ - 1]]
    assert len(calls) == 4  # the second time the capture was tried
    assert not graph.num_captures


def test_steps_that_are_captured_are_always_computed_and_kept_where_wanted() -> None:
    def doubled_if(inputs: list[Tensor]) -> list[Tensor]:
        return list(apply_if(inputs[0][0] > 1, lambda x: (2 * x,), (inputs[0],)))

    graph = GraphedProgram(doubled_if, None, record_on_tape, "toy")
    for value, wanted in ((3, 6), (4, 8), (1, 1), (2, 4), (0, 0)):
        assert graph([numbers(value)])[0].tolist() == [wanted]
    assert graph.num_captures == 1


def test_tensors_that_captured_code_reads_live_as_long_as_the_capture() -> None:
    """MUT: a cache might let them go, and others' numbers would lie at their addresses."""
    parents = (-1, 0, 0, 1, 2)

    def depths(inputs: list[Tensor]) -> list[Tensor]:
        return [tree_tensors(parents, 1, inputs[0].device).depth_BN + inputs[0]]

    def record_by_addresses(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], Any]:
        return (lambda: None), run()

    graph = GraphedProgram(depths, None, record_by_addresses, "toy")
    for _ in range(2):
        graph([numbers(1.0)])
    read = ref(tree_tensors(parents, 1, torch.device("cpu")).depth_BN)
    _cached_tree_tensors.cache_clear()
    gc.collect()
    assert read() is not None
    del graph
    gc.collect()
    assert read() is None


def test_captured_code_keeps_no_tensor_that_is_not_computed_yet() -> None:
    """Constant tensors are cached, but not those of a capture."""
    size = 71  # which no other test asks for
    with capturing():
        assert cached_arange(size, torch.device("cpu")).is_inference() is False
        first = cached_arange(size, torch.device("cpu"))
        assert first is not cached_arange(size, torch.device("cpu"))
    kept = cached_arange(size, torch.device("cpu"))
    assert kept is not first
    assert kept is cached_arange(size, torch.device("cpu"))
    with pytest.raises(NotImplementedError), capturing():
        Stream(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).uniforms_BJ  # noqa: B018


def test_the_recorder_records_as_cuda_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pool, on one stream of the model's device, whatever other threads allocate
    meanwhile, and the capture ends if the code fails."""
    events: list[Any] = []

    class Graph:
        def replay(self) -> None:
            events.append("replayed")

        def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
            events.append((pool, capture_error_mode))

        def capture_end(self) -> None:
            events.append("captured")

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            events.append(f"{self.name} waits for {other.name}")

    pools, streams = iter([(7, 0), (8, 0)]), iter([Stream("own"), Stream("other")])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(events.append(device)))
    record, device = CudaRecorder(torch.device("cuda:1")), torch.device("cuda:1")
    for _ in range(2):
        replay, results = record(lambda: events.append("run") or [numbers(1.0)])  # type: ignore[func-returns-value]
        assert results[0].tolist() == [1]
        replay()
    begin = ["own waits for current", device, ((7, 0), "thread_local")]
    end = ["captured", "current waits for own"]
    assert events == 2 * [*begin, "run", *end, "replayed"]
    events.clear()
    with pytest.raises(ZeroDivisionError):
        record(lambda: [numbers(1 / 0)])
    assert events == [*begin, "captured"]
    record(list)  # in other memory, since torch allows no other capture in the same
    assert ((8, 0), "thread_local") in events


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@ON_GPU
@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_on_a_gpu_what_it_writes_on_a_cpu(method: str) -> None:
    """By the models' own code in float64, eagerly and captured, greedily and sampled."""
    options, samplings, prompts = case_of(method)
    texts = []
    for device, compile in (("cpu", "off"), ("cuda", "off"), ("cuda", "auto")):
        target, draft = (worded(seed) for seed in (0, 3))
        models = [HFModel(m.module.to(device), m.tokenizer) for m in (target, draft)]
        for model in models:
            prepare.prepare(model, compile)
        engine = engine_of(*models, method, 3, options=options, max_batch_size=2)
        texts.append([token_ids(engine.generate(prompts, each)) for each in samplings])
    assert texts[0] == texts[1] == texts[2]
    own = engine.target, *engine.drafter.capabilities.models
    programs = [p for model in own if model.compiled for p in model.compiled._programs.values()]
    assert any(isinstance(p, GraphedProgram) and p.num_captures for p in programs)


@ON_GPU
@pytest.mark.parametrize(
    "method", ["speculative", "top-k-tree", "dynamic-tree", "eagle3", "peagle", "mentored"]
)
def test_fused_layers_write_the_same_text(method: str) -> None:
    """In float32, in which they take the place of models' own layers."""
    options, samplings, prompts = case_of(method)
    texts = []
    for compile in ("off", "auto"):
        models = [worded(seed) for seed in (0, 3)]
        models = [HFModel(m.module.cuda().float(), m.tokenizer) for m in models]
        for model in models:
            prepare.prepare(model, compile)
        assert ("forward" in vars(models[0].module.model.layers[0])) == (compile == "auto")
        engine = engine_of(*models, method, 3, options=options, max_batch_size=2)
        texts.append([token_ids(engine.generate(prompts, each)) for each in samplings])
    assert texts[0] == texts[1]


@ON_GPU
def test_rules_are_captured_on_a_gpu() -> None:
    models = [HFModel(tiny_module("llama", seed).cuda()) for seed in (0, 1)]
    for model in models:
        prepare.prepare(model, "auto")
    for method in ("speculative", "block", "suffix", "mentored", "spectr"):
        engine = engine_of(*models, method, 3)
        engine.generate(ragged_prompts([9, 3]), SAMPLED)
        assert engine.verification is not None
        programs = engine.verification._programs.values()
        assert any(isinstance(p, GraphedProgram) and p.num_captures for p in programs), method


@ON_GPU
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
