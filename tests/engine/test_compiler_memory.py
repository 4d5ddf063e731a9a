"""Processes that compile are as many as fit into memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_background import Cache, engine_with
from tiny_models import engine_of, greedy, tiny, tiny_module

from outrider import Engine
from outrider.core.errors import OutriderWarning
from outrider.engine import compiler_memory as module
from outrider.engine import compiler_process, loading
from outrider.engine.compiler_memory import OVERHEAD, compiler_memory
from outrider.engine.compiler_process import begin, has_room
from outrider.runtime import HFModel
from outrider.runtime.kernels import NarrowLinear

CORES = 9


@pytest.fixture
def engine() -> Engine:
    """An engine whose programs are all missing."""
    return engine_with(Cache())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes are started, each time that some are; on a machine with many cores."""
    nums: list[int] = []

    @contextmanager
    def beside(arguments: Any, num: int, start: Any) -> Iterator[bool]:
        nums.append(num)
        yield bool(num)

    def compiler(arguments: Any, todo: Any, num: int, start: Any) -> None:
        nums.append(num)

    monkeypatch.setattr(loading, "BackgroundCompiler", compiler)
    monkeypatch.setattr(loading, "compiling_beside", beside)
    monkeypatch.setattr(loading, "warm_up", lambda engine, report, shared: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(CORES), raising=False)
    return nums


def set_room(monkeypatch: pytest.MonkeyPatch, engine: Engine, num: float) -> None:
    """Sets the free memory to that of so many processes."""
    needed = compiler_memory(engine).needed
    monkeypatch.setattr(module, "free_bytes", lambda _: int(num * needed))


@pytest.mark.parametrize(("room", "num"), [(1.0, 1), (2.9, 2), (50, 3)])
def test_fewer_processes_compile_where_memory_is_short(
    engine: Engine, started: list[int], monkeypatch: pytest.MonkeyPatch, room: float, num: int
) -> None:
    """Three at most, in the background and beside this process."""
    set_room(monkeypatch, engine, room)
    assert not loading._load_programs(engine, {}, True, None, begin)
    assert loading._load_programs(engine, {}, False, None, begin)
    assert started == [num, num]


def test_nothing_is_compiled_in_the_background_where_no_process_fits(
    engine: Engine, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning names the models; the engine runs without programs."""
    set_room(monkeypatch, engine, 0.9)
    (draft,) = engine.drafter.capabilities.models
    engine.target.name, draft.name = "target big", "draft small"
    with pytest.warns(OutriderWarning) as seen:
        assert loading._load_programs(engine, {}, True, None, begin)
    (message,) = (str(each.message) for each in seen)
    assert message.startswith("target big and draft small: programs are not compiled")
    assert "`outrider compile`" in message
    assert (started, engine.compiler) == ([], None)
    (result,) = engine.generate([[3, 4]], greedy(4))
    assert result.token_ids


def test_this_process_compiles_alone_where_no_other_fits(
    engine: Engine, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_room(monkeypatch, engine, 0.9)
    assert loading._load_programs(engine, {}, False, None, begin)
    assert started == [0]


def test_a_process_takes_what_the_models_take_and_more() -> None:
    target, draft = tiny(), tiny(seed=1)
    sizes = [sum(p.nbytes for p in each.module.parameters()) for each in (target, draft)]
    assert compiler_memory(engine_of(target, draft)).needed == OVERHEAD + sum(sizes)
    assert compiler_memory(engine_of(target, None, "plain")).needed == OVERHEAD + sizes[0]


def test_weights_of_a_few_bits_are_read_in_the_models_precision() -> None:
    """While a process loads a model, it has the weights that will be rounded."""
    whole, rounded = tiny(), HFModel(tiny_module(), name="rounded")
    layer = rounded.module.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, torch.nn.Linear)
    layer.__class__ = NarrowLinear
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    engines = [engine_of(each, None, "plain") for each in (whole, rounded)]
    assert compiler_memory(engines[0]).needed == compiler_memory(engines[1]).needed


def test_a_process_without_models_needs_what_each_process_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_process, "num_processors", lambda: 2)
    for free, fits in ((OVERHEAD, True), (OVERHEAD - 1, False)):
        monkeypatch.setattr(compiler_process, "available_bytes", lambda free=free: free)
        assert has_room() is fits


def test_what_requests_may_take_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda _: 10 * 2**30)
    free = compiler_memory(engine_of(tiny(), tiny(seed=1), max_memory="4GiB")).free
    assert free == 6 * 2**30
    assert compiler_memory(engine_of(tiny(), None, "plain")).free == 10 * 2**30
    full = compiler_memory(engine_of(tiny(), None, "plain", max_memory="40GiB"))
    assert full.num_processes == 0
