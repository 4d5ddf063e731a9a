"""Models run without kernels until these are compiled, and then as if they had had them at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_background import Process
from test_compiler_process import arguments
from tiny_models import FAMILIES, engine_of, full_logits, greedy, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.core.errors import KernelError, OutriderWarning
from outrider.engine import loading
from outrider.engine.background import KERNELS, BackgroundCompiler, News
from outrider.engine.compiler_memory import CompilerMemory
from outrider.engine.late_kernels import LateKernels
from outrider.engine.warming import Stage, unloaded
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.runtime.executors import compile_cache
from outrider.runtime.executors.prepare import prepare
from outrider.runtime.kernels import NarrowLinear

PROMPTS = ragged_prompts([9, 14])
SAMPLINGS = greedy(6), Sampling(temperature=0.8, top_p=0.9, max_new_tokens=6, seed=3)


def has_kernels(model: HFModel) -> bool:
    return any(isinstance(each, NarrowLinear) for each in model.module.modules())


def sealed(model: HFModel) -> HFModel:
    """The model, which compiles no program."""
    assert model.compiled is not None
    model.compiled.sealed = True
    return model


def late(kernels: LateKernels, *settings: Any, **more: Any) -> HFModel:
    model = tiny(*settings, **more)
    kernels.prepare(model, "auto", exact=False, own=True)
    return sealed(model)


def at_once(*settings: Any, **more: Any) -> HFModel:
    model = tiny(*settings, **more)
    prepare(model, "auto", own=True)
    return sealed(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same_bits_as_one_that_had_kernels_at_once(
    family: str, dtype: torch.dtype
) -> None:
    """Before, those of a model that never has any."""
    kernels = LateKernels()
    model, other = late(kernels, family, dtype=dtype), at_once(family, dtype=dtype)
    tokens = PROMPTS[0]
    with torch.inference_mode():
        before = full_logits(model.module, tokens)
        assert torch.equal(before, full_logits(tiny(family, dtype=dtype).module, tokens))
        kernels.use()
        assert torch.equal(full_logits(model.module, tokens), full_logits(other.module, tokens))
    assert has_kernels(model) == has_kernels(other)


@pytest.mark.parametrize(
    "method",
    [
        *("plain", "speculative", "block", "sequoia", "hybrid", "mjsd", "early-exit"),
        *("eagle3", "peagle", "dflash", "medusa"),
    ],
)
def test_engines_take_over_kernels_between_two_requests(method: str) -> None:
    """Outputs before are those of models without kernels, outputs after those of models that had
    them at once: also of drafts that are made by layers of the target, or by heads. As long as
    kernels are missing, nothing has a program, neither heads nor rules."""
    kernels = LateKernels()
    drafts = METHODS[method].needs_draft
    engine = engine_of(late(kernels), late(kernels, seed=1) if drafts else None, method, 3)
    kernels.add_heads(engine)
    without = engine_of(tiny(), tiny(seed=1) if drafts else None, method, 3)
    with_kernels = engine_of(at_once(), at_once(seed=1) if drafts else None, method, 3)
    for each in (engine, with_kernels):
        unloaded(each)  # loading does so, too

    def outputs(each: Any) -> list[Any]:
        return [token_ids(each.generate(PROMPTS, sampling)) for sampling in SAMPLINGS]

    assert outputs(engine) == outputs(without)
    assert not engine._ignores_threads
    process = Process([{"compiled": KERNELS}])
    todo = [kernels.stage, Stage("another program", lambda: None, exact=True)]
    engine.compiler = BackgroundCompiler({}, todo, start=lambda _: process)  # type: ignore[arg-type, return-value]
    engine.compiler.wait()
    assert outputs(engine) == outputs(with_kernels)
    assert has_kernels(engine.target)
    assert engine._ignores_threads == with_kernels._ignores_threads
    models = engine.drafter.capabilities.models
    assert all(map(has_kernels, models))


def test_an_engine_that_is_made_meanwhile_gets_kernels_for_its_own_head() -> None:
    """Once: an engine that is made after that has a head with kernels."""
    kernels, row = LateKernels(), METHODS["eagle3"]
    engine = engine_of(late(kernels), None, "eagle3", 3)
    kernels.add_heads(engine)
    meanwhile = engine.with_method(row)
    (head,) = meanwhile.drafter.capabilities.models
    process = Process([{"compiled": KERNELS}])
    engine.compiler = BackgroundCompiler({}, [kernels.stage], start=lambda _: process)  # type: ignore[arg-type, return-value]
    engine.compiler.wait()
    assert not has_kernels(head)
    unloaded(meanwhile)  # programs are compiled for real in tests of their own
    meanwhile.generate(PROMPTS, greedy(4))
    assert has_kernels(head)
    (later,) = engine.with_method(row).drafter.capabilities.models
    assert has_kernels(later)
    assert not kernels._todo


def test_an_engine_that_is_made_of_a_sealed_one_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither for its own head nor for its rules: a request would wait for the compiler."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))  # which has no programs
    compiling = Mock(side_effect=RuntimeError)
    monkeypatch.setattr(compile_cache, "_compile", compiling)
    engine = engine_of(at_once(), None, "eagle3", 3)
    unloaded(engine)
    other = engine.with_method(METHODS["eagle3"])
    for sampling in SAMPLINGS:
        assert token_ids(other.generate(PROMPTS, sampling))
    assert not compiling.called


class Recorder:
    """A background compiler of stages that note when they are made."""

    def __init__(self, said: list[News]) -> None:
        self.made: list[str] = []
        note = self.made.append
        stages = [
            Stage("kernels", lambda: note("kernels"), exact=False, number=KERNELS),
            Stage("exact", lambda: note("exact"), exact=True, number=0),
            Stage("other", lambda: note("other"), exact=False, number=1),
        ]
        process = Process(said)
        self.compiler = BackgroundCompiler({}, stages, start=lambda _: process)  # type: ignore[arg-type, return-value]
        self.compiler.wait()


def test_nothing_is_taken_over_before_the_kernels() -> None:
    """Not even what is exact, while requests run."""
    recorder = Recorder([{"compiled": number} for number in (0, 1, KERNELS)])
    recorder.compiler.take_over(idle=False)
    assert recorder.made == []
    recorder.compiler.take_over(idle=True)
    assert recorder.made == ["kernels", "exact", "other"]
    assert not recorder.compiler.num_missing


def test_programs_wait_for_kernels_that_are_not_compiled() -> None:
    recorder = Recorder([{"compiled": 0}, {"compiled": 1}])
    recorder.compiler.take_over(idle=True)
    assert recorder.made == []
    assert recorder.compiler.num_missing == 3


def test_kernels_that_do_not_compile_leave_the_models_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = LateKernels()
    engine = engine_of(late(kernels, name="target"), late(kernels, seed=1, name="draft"), γ=3)
    before = token_ids(engine.generate(PROMPTS, SAMPLINGS[0]))
    error = Mock(side_effect=KernelError("no C++ compiler here"))
    monkeypatch.setattr("outrider.runtime.kernels.layers.load_kernels", error)
    with pytest.warns(OutriderWarning, match="target and draft run eagerly: no C"):
        kernels.use()
    assert token_ids(engine.generate(PROMPTS, SAMPLINGS[0])) == before


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of ``load``, on a machine that has the kernels' compiler, but not the kernels."""
    here = {"missing": True, "room": True, "others": True, "processes": 1}
    monkeypatch.setattr(loading, "kernels_are_missing", lambda: here["missing"])
    monkeypatch.setattr(loading.compiler_process, "has_room", lambda: here["room"])
    monkeypatch.setattr(loading, "others_compile_kernels", lambda: here["others"])
    memory = lambda _: CompilerMemory(1, here["processes"])  # noqa: E731
    monkeypatch.setattr(loading, "compiler_memory", memory)
    monkeypatch.setattr(loading.compiler_process, "begin", lambda: pytest.fail("a process begins"))
    monkeypatch.setattr(loading, "compiler_at_hand", Mock(side_effect=AtHand))
    told = arguments(tmp_path) | {"compile": "auto", "background": True}
    return {"here": here, "load": told}


class AtHand:
    """A compiler whose process says that it has compiled the kernels."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted

    def __enter__(self) -> Any:
        process = Process([{"compiled": KERNELS}] * self.wanted)
        return lambda: process

    def __exit__(self, *_: object) -> None:
        pass


def test_requests_do_not_wait_for_kernels(bare: Mapping[str, Any]) -> None:
    engine = loading.load(**bare["load"])
    assert not has_kernels(engine.target)
    assert engine.compiler is not None
    assert engine.compiler.num_missing > 1
    for _ in range(2):  # the first one may begin before the process has said so
        engine.generate([[1, 2, 3]], greedy(2))
        engine.compiler.wait()
    assert has_kernels(engine.target)


@pytest.mark.parametrize(
    ("here", "settings"),
    [
        ({"missing": False}, {}),
        ({"room": False}, {}),
        ({"others": False}, {}),
        ({"processes": 0}, {}),
        ({}, {"exact": True}),
        ({}, {"quantize_target": "int8"}),
        ({}, {"background": False}),
    ],
)
@pytest.mark.filterwarnings("ignore::outrider.core.errors.OutriderWarning")
def test_loading_waits_for_kernels(
    here: dict[str, Any],
    settings: dict[str, Any],
    bare: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nobody else can compile them, and where they decide what is loaded."""
    bare["here"].update(here)
    monkeypatch.setattr(loading, "warm_up", lambda *_, **__: None)
    engine = loading.load(**bare["load"] | settings)
    assert has_kernels(engine.target)
