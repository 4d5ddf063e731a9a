"""Graphs compiled ahead of time are kept under what they were made from, and read live weights."""

import gc
import inspect
import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock, Thread
from weakref import ref

import pytest
import torch
from tiny_models import tiny
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from outrider.runtime import HFModel
from outrider.runtime.executors import compile_cache
from outrider.runtime.executors.compile_cache import Program, compiled_program, dependencies
from outrider.runtime.executors.fused_draft import GreedyDraft, SampledDraft
from outrider.runtime.executors.traced import ChainForward, NodesForward, TreeForward
from outrider.runtime.kernels import build, use_kernels

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")


class Affine(nn.Module):
    """A weight, a buffer under two names and a constant that only the program knows."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, generator=generator))
        self.register_buffer("shift", torch.randn(4, generator=generator), persistent=False)
        self.same = self.shift

    def forward(self, x_N4: Tensor) -> tuple[Tensor]:
        literal_4 = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return (x_N4 * self.weight + self.shift + self.same * literal_4,)


def tracer(module: nn.Module, calls: list[int]) -> Callable[[], ExportedProgram]:
    def trace() -> ExportedProgram:
        calls.append(1)
        with torch.no_grad():
            return export(module, (torch.ones(3, 4),), dynamic_shapes=({0: Dim("rows")},))

    return trace


@needs_compiler
@pytest.mark.slow
def test_is_compiled_once_and_reads_each_modules_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels, whose library runs programs: other threads run meanwhile."""
    build.load_kernels()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    calls: list[int] = []
    for seed in (0, 1):
        module = Affine(seed)
        graph = compiled_program(module, tracer(module, calls), own=True)
        for rows in (1, 2, 7):
            x_N4 = torch.randn(rows, 4)
            torch.testing.assert_close(graph([x_N4])[0], module(x_N4)[0])
        with torch.no_grad():
            module.weight.mul_(3)
        torch.testing.assert_close(graph([x_N4])[0], module(x_N4)[0])
    assert len(calls) == 1
    assert len(list(tmp_path.glob("programs/*.pt2"))) == 1
    assert len(list(tmp_path.glob("programs/interface-*.o"))) == 1
    foreign = compiled_program(module, tracer(module, calls), own=False)
    assert len(calls) == 2
    torch.testing.assert_close(foreign([x_N4])[0], module(x_N4)[0])
    monkeypatch.setattr("outrider.runtime.executors.extracted.kernels_are_loaded", lambda: False)
    theirs = compiled_program(module, tracer(module, calls), own=False)
    assert torch.equal(theirs([x_N4])[0], foreign([x_N4])[0])
    assert lets_others_run(foreign)
    assert not lets_others_run(lambda inputs: [2 * len(inputs)])  # type: ignore[list-item]


_HELD: list[Program] = []


class Forgetful(nn.Module):
    """Drops the last reference to a program while it is traced, as garbage collection may."""

    def forward(self, x_N4: Tensor) -> tuple[Tensor]:
        _HELD.clear()
        return (x_N4 + 1,)


@needs_compiler
@pytest.mark.slow
def test_a_program_that_is_freed_during_tracing_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call recorded in another program would free the address again whenever that one runs."""
    build.load_kernels()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    module = Affine()
    _HELD.append(compiled_program(module, tracer(module, []), own=True))
    held = ref(_HELD[0])
    traced = tracer(Forgetful(), [])()
    assert held() is None
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.aten.add.Tensor]


@needs_compiler
@pytest.mark.slow
def test_a_program_that_is_freed_keeps_neither_weights_nor_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All programs may use symbols of the one that is loaded first, whose library stays."""
    build.load_kernels()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))

    def memory_of_weights() -> "ref[array[float]]":
        numbers = array("f", range(4))
        module = Affine()
        module.weight = nn.Parameter(torch.frombuffer(numbers, dtype=torch.float32))
        program = compiled_program(module, tracer(module, []), own=True)
        x_N4 = torch.ones(3, 4)
        torch.testing.assert_close(program([x_N4])[0], module(x_N4)[0])
        return ref(numbers)

    memory_of_weights()  # compiled; the compiler keeps what it has traced
    num_mapped = []
    for _ in range(2):
        weights = memory_of_weights()
        gc.collect()
        assert weights() is None
        num_mapped.append(num_mapped_libraries())
    assert num_mapped[0] == num_mapped[1]


def num_mapped_libraries() -> int:
    """Segments of programs' libraries that this process has mapped; 0 where it cannot be told."""
    maps = Path("/proc/self/maps")
    return maps.read_text().count(".wrapper.so") if maps.exists() else 0


def lets_others_run(program: Program) -> bool:
    """Whether Python's other threads run during a call. Here they get its lock only where a thread
    gives it up, and a call of some milliseconds is repeated until another thread has awoken."""
    x_N4 = torch.randn(2**18, 4)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for _ in range(2000):
            order: list[str] = []
            asleep = Lock()
            asleep.acquire()
            other = Thread(target=lambda: asleep.acquire() and order.append("other"))  # noqa: B023
            other.start()
            asleep.release()
            outputs = program([x_N4])
            order.append("called")
            del outputs  # not before: torch gives up the lock where it frees memory
            other.join()
            if order[0] == "other":
                return True
    finally:
        sys.setswitchinterval(interval)
    return False


@needs_compiler
@pytest.mark.slow
def test_a_patched_module_gets_a_graph_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    x_N4 = torch.randn(2, 4)
    for sign in (1, -1):
        module = Affine()
        original = module.forward
        module.forward = lambda x, f=original, s=sign: (s * f(x)[0],)  # type: ignore[method-assign,misc]
        graph = compiled_program(module, tracer(module, []))
        torch.testing.assert_close(graph([x_N4])[0], module(x_N4)[0])
    assert len(list(tmp_path.glob("programs/*.pt2"))) == 2


def parts(model: HFModel) -> list[str]:
    return dependencies(ChainForward(model.module, model.spec))


def test_names_what_it_was_made_from() -> None:
    same = parts(tiny())
    renamed = tiny(seed=1)
    renamed.module.config._name_or_path = "elsewhere"
    assert parts(renamed) == same
    others = [tiny("qwen3"), tiny(rms_norm_eps=0.1), tiny(dtype=torch.bfloat16)]
    assert all(parts(other) != same for other in others)


def test_programs_of_another_processor_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that share a cache folder may lack instructions of each other's processor."""
    before = parts(tiny())
    monkeypatch.setattr(compile_cache, "processor_name", lambda: "another")
    assert parts(tiny()) != before


def test_each_kind_of_pass_and_length_of_draft_has_a_name_of_its_own() -> None:
    model = tiny()
    settings = model.module, model.spec
    passes = [ChainForward(*settings), TreeForward(*settings), NodesForward(*settings)]
    passes += [kind(*settings, depth) for kind in (GreedyDraft, SampledDraft) for depth in (2, 5)]
    passes.append(ChainForward(model.module, replace(model.spec, limit=model.limit - 1)))
    passes.append(ChainForward(model.module, replace(model.spec, windows={"full": 7})))
    recording = model.eager.recording((1,))
    passes += [ChainForward(recording, model.spec, (1,)), ChainForward(recording, model.spec)]
    names = {str(dependencies(each)) for each in passes}
    assert len(names) == len(passes)


@pytest.mark.parametrize(
    "name",
    [
        "core.chain",
        "core.draw",
        "core.health",
        "runtime.attention_metadata",
        "runtime.executors.eager",
        "runtime.executors.fused_draft",
        "runtime.executors.traced",
        "runtime.hf.hidden_states",
        "runtime.kernels.truncation",
        "runtime.kv_cache.storage",
        "sampling.truncate",
        "sampling.warp",
    ],
)
def test_the_name_changes_with_the_source_of_what_is_traced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file that a fused draft runs through."""
    model = tiny()
    each = SampledDraft(model.module, model.spec, 2)
    before, source = dependencies(each), inspect.getsource
    edited = sys.modules[f"outrider.{name}"]
    monkeypatch.setattr(inspect, "getsource", lambda m: source(m) + "#" * (m is edited))
    assert dependencies(each) != before


@needs_compiler
def test_kernels_and_exactness_are_part_of_the_name() -> None:
    plain, kernels, exact = tiny(), tiny(), tiny()
    use_kernels(kernels.module)
    use_kernels(exact.module, exact=True)
    assert len({str(parts(model)) for model in (plain, kernels, exact)}) == 3
