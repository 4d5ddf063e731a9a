"""Programs that other processes compile are taken over between rounds, and change no output."""

import io
import json
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from interpreted_graphs import interpreted, untraced
from tiny_models import engine_of, greedy, ragged_prompts, tiny
from torch import nn

from outrider import Engine, Sampling
from outrider.core.errors import OutriderWarning
from outrider.engine import assembly, background
from outrider.engine.background import (
    BackgroundCompiler,
    News,
    compiler_at_hand,
    compiling_beside,
)
from outrider.engine.shared_programs import SharedPrograms
from outrider.engine.warming import Stage, layers_of, load_compiled, missing_of, programs_of
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.runtime.executors.compile_cache import _MISSING, Missing, Program, ProgramMissingError
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.fused_verification import CompiledVerifier
from outrider.runtime.executors.layer_programs import LayerForward

γ = 3


class Cache:
    """A compile cache that another process fills: empty until ``filled``."""

    def __init__(self) -> None:
        self.filled = False
        self.calls = 0

    def __call__(self, module: nn.Module, trace: Any, own: bool = False) -> Program:
        choice, left = _MISSING.get()
        assert choice is Missing.LEAVE, "a request compiles"
        if not self.filled:
            left.append(module)  # type: ignore[arg-type]
            raise ProgramMissingError
        program = untraced(module)

        def counted(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            self.calls += 1
            return program(inputs)

        return counted

    def give(self, model: HFModel) -> HFModel:
        model.compiled = CompiledExecutor(model.module, model.spec, "model", self)
        return model


class Process:
    """A process that compiles: it has said what it has to say."""

    def __init__(self, said: list[News], code: int = 0) -> None:
        lines = "".join(json.dumps(each) + "\n" for each in said)
        self.stdin = io.BytesIO()
        self.stdout = io.BytesIO(f"no document\n{lines}".encode())
        self._code = code

    def wait(self, timeout: float | None = None) -> int:
        return self._code


def sleeper() -> Any:
    """A process that does not notice that its input ends."""
    return subprocess.Popen(
        ["sleep", "1000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )


def engine_with(cache: Cache) -> Engine:
    engine = engine_of(cache.give(tiny()), cache.give(tiny(seed=1)), "speculative", γ)
    engine.verification = CompiledVerifier(cache)
    return engine


def compiler(todo: list[Stage], said: list[News], code: int = 0) -> BackgroundCompiler:
    found = BackgroundCompiler({}, todo, start=lambda _: Process(said, code))  # type: ignore[arg-type, return-value]
    found.wait()
    return found


def all_of(engine: Engine) -> list[News]:
    return [{"compiled": stage.number} for stage in programs_of(engine)]


def test_requests_run_while_programs_are_missing_and_use_them_afterwards() -> None:
    cache = Cache()
    engine = engine_with(cache)
    missing = load_compiled(engine)
    assert len(missing) == len(programs_of(engine)) == 6
    prompts = ragged_prompts([9, 30])
    samplings = greedy(8), Sampling(max_new_tokens=8, seed=3)
    engine.compiler = compiler(missing, [])
    before = [engine.generate(prompts, each) for each in samplings]
    assert cache.calls == 0
    cache.filled = True
    engine.compiler = compiler(missing, all_of(engine))
    after = [engine.generate(prompts, each) for each in samplings]
    assert cache.calls > 0
    assert engine.compiler is None
    for one, other in zip(before, after, strict=True):
        assert [r.token_ids for r in one] == [r.token_ids for r in other]
    assert engine.target.compiled is not None
    assert engine.verification is not None
    assert all(engine.verification._programs.values())


def test_programs_that_round_elsewhere_wait_until_no_request_runs() -> None:
    """Also of the requests that another caller runs."""
    cache = Cache()
    engine = engine_with(cache)
    missing = load_compiled(engine)
    (first, second) = ragged_prompts([9, 12])
    rows = engine.run(first, greedy(12))
    next(rows)
    cache.filled = True
    engine.compiler = compiler(missing, all_of(engine))
    engine.generate([second], greedy(2))
    assert engine.compiler is not None
    assert engine.compiler.num_missing == 5  # greedy decisions are exact
    list(rows)
    engine.generate([second], greedy(2))
    assert engine.compiler is None


class Clock:
    """The time of ``background.py``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(background.time, "monotonic", lambda: self.now)


def overlapping(
    engine: Engine, clock: Clock, each: float, num: int, found: BackgroundCompiler | None = None
) -> list[tuple[int, ...]]:
    """Outputs of requests each of which arrives before the one before it has ended, with so many
    seconds between two steps. The engine gets the compiler after the first step."""
    scheduler, outputs = engine.new_scheduler(), dict[int, tuple[int, ...]]()
    prompts = ragged_prompts([9] * num)
    lengths = [8 if number % 2 else 13 for number in range(num)]  # no two end together
    pairs = zip(prompts, lengths, strict=True)
    requests = [engine.request(prompt, greedy(length)) for prompt, length in pairs]
    ids = [scheduler.add(requests[0]), scheduler.add(requests[1])]
    while len(outputs) < num:
        clock.now += each
        steps = scheduler.step()
        if found is not None:
            engine.compiler, found = found, None
        for progress in steps:
            if progress.row.over:
                outputs[progress.request_id] = tuple(progress.row.token_ids)
                if len(ids) < num:
                    ids.append(scheduler.add(requests[len(ids)]))
    return [outputs[number] for number in ids]


def test_requests_that_overlap_wait_once_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a moment in which no request runs, new requests wait for it after a minute."""
    plain = overlapping(engine_with(Cache()), Clock(monkeypatch), 0.0, 12)
    for seconds, taken in ((0.1, False), (30.0, True)):
        cache = Cache()
        engine = engine_with(cache)
        missing = load_compiled(engine)
        cache.filled = True
        found = compiler(missing, all_of(engine))
        assert overlapping(engine, Clock(monkeypatch), seconds, 12, found) == plain
        assert (engine.compiler is None) == taken


def test_new_requests_wait_for_so_long_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine's request may never end."""
    clock, cache = Clock(monkeypatch), Cache()
    engine = engine_with(cache)
    found = compiler(load_compiled(engine), all_of(engine))
    for seconds, waits in ((0, False), (59, False), (61, True), (359, True), (361, False)):
        clock.now = float(seconds)
        found.take_over(idle=False)
        assert found.waits_for_idle == waits, seconds
    cache.filled = True
    found.take_over(idle=True)
    assert not found.waits_for_idle


def test_engines_of_other_methods_wait_for_each_other_and_share_the_programs() -> None:
    cache = Cache()
    engine = engine_with(cache)
    missing = load_compiled(engine)
    other = engine.with_method(METHODS["block"])
    first, second = ragged_prompts([9, 12])
    rows = other.run(first, greedy(12))
    next(rows)
    cache.filled = True
    engine.compiler = compiler(missing, all_of(engine))
    engine.generate([second], greedy(2))
    assert engine.compiler is not None
    assert engine.compiler.num_missing == 5  # greedy decisions are exact
    list(rows)
    other.generate([second], greedy(2))
    assert engine.compiler is other.compiler is None


def test_engines_of_other_methods_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache fails where a program is to be compiled."""
    cache = Cache()
    engine = engine_with(cache)
    load_compiled(engine)
    monkeypatch.setattr(assembly, "compiled_program", lambda *args, **_: cache(*args[:2]))
    other = engine.with_method(METHODS["block"])
    assert isinstance(other.verification, CompiledVerifier)
    for sampling in (greedy(4), Sampling(max_new_tokens=4, seed=1)):
        other.generate(ragged_prompts([9]), sampling)
    assert cache.calls == 0
    cache.filled = True
    again = engine.with_method(METHODS["block"])
    again.generate(ragged_prompts([9]), greedy(4))
    assert cache.calls > 0


def test_outputs_that_an_error_interrupts_are_not_over() -> None:
    """They are resumed by the programs that they began with."""
    cache = Cache()
    engine = engine_with(cache)
    missing = load_compiled(engine)
    scheduler = engine.new_scheduler()
    for prompt in ragged_prompts([9, 12]):
        scheduler.add(engine.request(prompt, greedy(12)))
    scheduler.step()
    assert not scheduler.is_idle
    batch = scheduler.batches[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "step", raises_interrupt)
        with pytest.raises(KeyboardInterrupt):
            scheduler.step()
    cache.filled = True
    rounded = [{"compiled": stage.number} for stage in missing if not stage.exact]
    engine.compiler = compiler(missing, rounded)
    assert scheduler.num_running == 0
    while scheduler.num_running + scheduler.num_waiting or not scheduler.is_idle:
        scheduler.step()
        assert cache.calls == 0
    scheduler.add(engine.request(ragged_prompts([9])[0], greedy(2)))
    scheduler.step()
    assert engine.compiler.num_missing == 1


def raises_interrupt() -> None:
    raise KeyboardInterrupt


def test_a_governor_forgets_the_times_of_what_programs_replace() -> None:
    cache = Cache()
    model, draft = cache.give(tiny()), cache.give(tiny(seed=1))
    engine = engine_of(model, draft, "speculative", "auto")
    missing = load_compiled(engine)
    engine.generate(ragged_prompts([9]), greedy(30))
    assert engine.governor is not None
    assert "seconds, draft" in engine.governor.beliefs(1, greedy=True)
    cache.filled = True
    engine.compiler = compiler(missing, all_of(engine))
    seen: list[bool] = []
    for _ in engine.run(ragged_prompts([9])[0], greedy(30)):
        seen.append("seconds, draft" in engine.governor.beliefs(1, greedy=True))
    assert not seen[0]
    assert seen[-1]


class LayersFirst(Cache):
    """A compile cache in which programs of layers come before others."""

    def __init__(self) -> None:
        super().__init__()
        self.has_layers = False
        self.layer_calls = 0

    def __call__(self, module: nn.Module, trace: Any, own: bool = False) -> Program:
        if not isinstance(module, LayerForward) or not self.has_layers:
            return super().__call__(module, trace, own)
        program = interpreted(module, trace)

        def counted(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            self.layer_calls += 1
            return program(inputs)

        return counted


def deep_engine_with(cache: Cache) -> Engine:
    """An engine whose target has so many layers that they have a program of their own."""
    engine = engine_of(cache.give(tiny(num_hidden_layers=4)), cache.give(tiny(seed=1)), γ=γ)
    engine.verification = CompiledVerifier(cache)
    return engine


def test_layers_run_by_their_program_until_there_is_one_of_the_forward_pass() -> None:
    cache = LayersFirst()
    engine = deep_engine_with(cache)
    missing = load_compiled(engine)
    layers = missing_of(layers_of(engine))
    assert [stage.what for stage in layers] == [f"layers of {engine.target.name}"]
    assert {stage.number for stage in layers}.isdisjoint(stage.number for stage in missing)
    prompts = ragged_prompts([9, 30])
    wanted = engine.generate(prompts, greedy(8))
    cache.has_layers = True
    engine.compiler = compiler([*layers, *missing], [{"compiled": layers[0].number}])
    by_layers = engine.generate(prompts, greedy(8))
    assert cache.layer_calls
    assert not cache.calls
    assert engine.compiler is not None
    cache.filled, cache.layer_calls = True, 0
    engine.compiler = compiler(missing, all_of(engine))
    whole = engine.generate(prompts, greedy(8))
    assert cache.calls
    assert not cache.layer_calls
    for one, other, third in zip(wanted, by_layers, whole, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids


def test_layers_are_left_alone_where_there_is_a_program_of_the_forward_pass() -> None:
    cache = LayersFirst()
    engine = deep_engine_with(cache)
    cache.filled = True
    assert not missing_of(layers_of(engine))
    assert not load_compiled(engine)
    assert engine.target.compiled is not None
    assert engine.target.compiled._layers is None


def test_layers_of_exact_models_are_taken_over_while_requests_run() -> None:
    engine = deep_engine_with(LayersFirst())
    assert [stage.exact for stage in layers_of(engine)] == [False]
    engine.target.exact = True
    assert [stage.exact for stage in layers_of(engine)] == [True]


def test_nobody_waits_for_programs_of_layers() -> None:
    """They are none of the programs that are compiled ahead."""
    engine = deep_engine_with(Cache())
    assert not any("layers" in stage.what for stage in programs_of(engine))


def test_requests_leave_processors_to_the_processes_that_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every step, the one that takes programs over included; until the processes have ended."""
    inside: list[int] = []
    seen: list[tuple[str, list[int]]] = []

    @contextmanager
    def beside(num: int, looks: bool) -> Iterator[None]:
        inside.append(num)
        yield
        inside.pop()

    monkeypatch.setattr("outrider.engine.engine.sharing_processors", beside)
    engine = engine_with(Cache())
    forward = engine.target.forward

    def watched(batch: Any) -> Any:
        seen.append(("pass", list(inside)))
        return forward(batch)

    monkeypatch.setattr(engine.target, "forward", watched)
    stage = Stage("rule", lambda: seen.append(("program", list(inside))), True, 0)
    engine.compiler = compiler([stage, stage._replace(number=1)], [{"compiled": 0}])
    engine.compiler._threads = [Thread(), Thread()]
    monkeypatch.setattr(Thread, "is_alive", lambda self: True)
    engine.generate([[1, 2, 3]], greedy(4))
    assert {what for what, _ in seen} == {"pass", "program"}
    assert all(nums == [2] for _, nums in seen)
    monkeypatch.setattr(Thread, "is_alive", lambda self: False)
    seen.clear()
    engine.generate([[1, 2, 3]], greedy(4))
    assert seen
    assert not any(nums for _, nums in seen)
    engine._ignores_threads = True  # it looks for others
    seen.clear()
    engine.generate([[1, 2, 3]], greedy(4))
    assert seen
    assert all(nums == [0] for _, nums in seen)


def test_two_threads_take_over_each_program_once() -> None:
    made: list[str] = []
    shared = SharedPrograms()

    def make() -> None:
        if not made:
            made.append("first")
            second.start()
            second.join(0.1)
        else:
            made.append("again")

    shared.compiler = compiler([Stage("rule", make, True, 0)], [{"compiled": 0}])
    second = Thread(target=shared.take_over)
    shared.take_over()
    second.join()
    assert made == ["first"]
    assert (shared.compiler, shared.num_changes) == (None, 1)


def test_exact_programs_are_taken_over_while_requests_run() -> None:
    made: list[str] = []
    todo = [
        Stage("rounded", partial(made.append, "rounded"), False, 0),
        Stage("exact", partial(made.append, "exact"), True, 1),
    ]
    found = compiler(todo, [{"compiled": 0}, {"compiled": 1}])
    found.take_over(idle=False)
    assert (made, found.num_missing) == (["exact"], 1)
    found.take_over(idle=True)
    assert (made, found.num_missing) == (["exact", "rounded"], 0)


def test_only_forward_passes_of_exact_models_are_exact() -> None:
    cache = Cache()
    engine = engine_with(cache)
    assert [stage.what for stage in programs_of(engine) if stage.exact] == ["rule Greedy"]
    engine.target.exact = True
    exact = [stage.what for stage in programs_of(engine) if stage.exact]
    assert exact == [f"forward passes of {engine.target.name}", "rule Greedy"]


def test_rules_that_compute_with_logits_are_not_exact() -> None:
    """A rounding error may move a probability across a threshold."""
    cache = Cache()
    engine = engine_of(cache.give(tiny()), cache.give(tiny(seed=1)), "relaxed", γ)
    engine.verification = CompiledVerifier(cache)
    rules = {stage.what: stage.exact for stage in programs_of(engine) if "rule" in stage.what}
    assert rules == {"rule RelaxedGreedy": False, "rule Relaxed": False}


def test_warnings_and_the_end_of_the_process_are_passed_on() -> None:
    found = compiler([], [{"warning": "m does not compile, so it runs eagerly"}], code=3)
    with pytest.warns(OutriderWarning) as seen:
        found.take_over(idle=True)
    texts = [str(each.message) for each in seen]
    assert texts[0] == "m does not compile, so it runs eagerly"
    assert "exit code 3" in texts[1]
    assert not found.is_running


def test_helpers_that_cannot_be_started_are_done_without() -> None:
    def fail(_: Mapping[str, Any]) -> Any:
        raise OSError("no more processes")

    with compiling_beside({}, 2, fail) as shared:
        assert not shared


def test_a_process_whose_input_stays_open_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process that was forked meanwhile has it, too."""
    monkeypatch.setattr(background, "_PATIENCE", 0.0)
    processes = []

    def start(_: Mapping[str, Any]) -> Any:
        processes.append(sleeper())
        return processes[-1]

    with compiling_beside({}, 1, start) as shared:
        assert shared
    assert processes[0].returncode == -signal.SIGKILL


def test_helpers_are_ended() -> None:
    process = Process([])
    with compiling_beside({}, 1, lambda _: process) as shared:  # type: ignore[arg-type, return-value]
        assert shared
    assert process.stdin.closed


def test_the_process_at_hand_is_used_first() -> None:
    begun = [Process([]) for _ in range(2)]
    left = iter(begun)
    with compiler_at_hand(True, lambda: next(left)) as begin:  # type: ignore[arg-type, return-value]
        assert begin() is begun[0]
        assert begin() is begun[1]
    assert not begun[0].stdin.closed
    assert next(left, None) is None


def test_no_process_is_at_hand_where_none_is_wanted() -> None:
    with compiler_at_hand(False, lambda: pytest.fail("a process is started")):
        pass


def test_a_process_at_hand_that_nobody_uses_is_killed() -> None:
    processes = []

    def begin() -> Any:
        processes.append(sleeper())
        return processes[-1]

    with pytest.raises(OSError, match="no such model"), compiler_at_hand(True, begin):
        raise OSError("no such model")
    (process,) = processes
    assert process.returncode == -signal.SIGKILL


def test_no_process_at_hand_can_be_started() -> None:
    def fail() -> Any:
        raise OSError("no more processes")

    with compiler_at_hand(True, fail) as begin, pytest.raises(OSError, match="no more"):
        begin()
