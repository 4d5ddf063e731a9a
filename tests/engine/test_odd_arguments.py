"""Every argument of the Python interface with invalid values.

A call must either succeed or raise an ``OutriderError`` with a one-line message; any other error is
a bug. Arguments and values are combined in a fixed product, so a failure names both.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_tokenizers import worded
from tiny_models import engine_of, tiny, tiny_module

from outrider import Engine, OutriderError, Sampling, load, load_model
from outrider.core.errors import ModelLoadError, NonFiniteLogitsError, OutOfMemoryError
from outrider.core.values import shown
from outrider.methods import METHODS, find_method
from outrider.runtime import HFModel

NAN, INF = float("nan"), float("inf")
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 64, 65, 10**30, -(10**30), 10**400, 10**5000),
    *(0.0, 0.5, -0.5, 1.5, NAN, INF, -INF, 1e-320, 1e300, 1 + 2j),
    *("", "x", "auto", "fixed", "5", "\ud800", "a\nb\x00", "~/x", "x" * 300, b"", b"x"),
    *((), [], [None], [1], [0.5], ["x"], [""], [b"x"], [[1]], [[]], [10**30], ("x", 3)),
    *({}, {1: 1}, {1: None}, {"a": 1}, {0: "x"}, {None: NAN}, {10**30: 1}, {1: 10**400}),
    *({1: torch.ones(2)}, {2: np.float32(0.5)}, {"input_ids": [1]}, {"input_ids": None}),
    *(set(), {1}, {"x"}, object(), int, Path("x"), range(2), torch.float16, torch.device("meta")),
    *(np.int64(3), np.float32(0.5), np.float64(NAN), np.bool_(True), np.str_("x"), np.array(3)),
    *(np.array([1, 2]), np.array(["x"]), np.array([0.5]), np.datetime64("2020-01-01")),
    *(torch.tensor(2), torch.tensor(0.5), torch.tensor([[1, 2]]), torch.rand(1, 2, 3)),
    *(torch.nn.Linear(2, 2), Sampling(max_new_tokens=1), [Sampling(max_new_tokens=1)] * 2),
]
GENERATORS: list[Callable[[], Any]] = [
    lambda: iter([1]),
    lambda: (each for each in [[1], "x", None]),
]
NOT_VALUE_ERRORS = ModelLoadError | NonFiniteLogitsError | OutOfMemoryError


def odd_values() -> Iterator[Any]:
    yield from ODD
    yield from (make() for make in GENERATORS)


def foreign(call: Callable[[Any], object], name: str, skip: Callable[[Any], bool]) -> list[str]:
    """The values for which a call raises another error, or an OutriderError with a bad message."""
    wrong = []
    for value in odd_values():
        if skip(value):
            continue
        try:
            call(value)
        except OutriderError as error:
            if not isinstance(error, ValueError | NOT_VALUE_ERRORS):
                wrong.append(f"{name}={shown(value)}: {type(error).__name__} is no ValueError")
            if "\n" in str(error) or len(str(error)) > 1500:
                wrong.append(f"{name}={shown(value)}: {error}")
        except Exception as error:
            wrong.append(f"{name}={shown(value)}: {type(error).__name__}: {str(error)[:100]}")
    return wrong


def check(
    call: Callable[[Any], object], name: str, skip: Callable[[Any], bool] = lambda value: False
) -> None:
    wrong = foreign(call, name, skip)
    assert not wrong, "\n".join(wrong)


@cache
def engine(method: str = "speculative") -> Engine:
    target, draft = (tiny(seed=seed, max_position_embeddings=12) for seed in (0, 1))
    return engine_of(target, draft, method)


def parameters(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", [field.name for field in fields(Sampling)])
def test_sampling(name: str) -> None:
    def call(value: Any) -> None:
        few = {} if name == "max_new_tokens" else {"max_new_tokens": 2}
        sampling = Sampling(**{name: value}, **few)
        if name != "processors":  # processors may raise any error
            engine().generate([[1, 2]], sampling)

    check(call, name)


@pytest.mark.parametrize("name", parameters(Engine.generate))
def test_generate(name: str) -> None:
    given = {"prompts": [[1, 2]], "sampling": Sampling(max_new_tokens=2)}
    for each in (engine(), wordy()):
        check(lambda value, each=each: each.generate(**given | {name: value}), name)


@pytest.mark.parametrize("name", parameters(Engine.stream))
def test_stream_run_and_encode(name: str) -> None:
    given = {"prompt": [1, 2], "sampling": Sampling(max_new_tokens=2)}
    for each in (engine(), wordy()):
        for method in (each.stream, each.run):
            check(lambda value, method=method: list(method(**given | {name: value})), name)
        if name == "prompt":
            check(each.encode, name)


@cache
def wordy() -> Engine:
    """An engine with a tokenizer."""
    return engine_of(worded(max_position_embeddings=12))


@pytest.mark.parametrize("name", parameters(Engine.__init__))
def test_engine(name: str) -> None:
    target, draft = tiny(max_position_embeddings=12), tiny(seed=1, max_position_embeddings=12)
    given = {"target": target, "draft": draft, "method": METHODS["speculative"]}

    def call(value: Any) -> None:
        made = Engine(**given | {name: value})
        made.generate([[1, 2]], Sampling(max_new_tokens=2))

    check(call, name)


def takes_minutes(value: Any) -> bool:
    """Whether the value starts compilation, or the build of exact kernels."""
    return isinstance(value, str | bool | np.bool_) and str(value) in ("auto", "True")


@pytest.mark.parametrize("name", parameters(load))
def test_load(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = {"target": tiny_module(max_position_embeddings=12), "draft": tiny_module(seed=1)}
    skip = takes_minutes if name in ("compile", "exact") else lambda value: False
    if name == "report":  # a function may raise any error
        skip = callable

    def call(value: Any) -> None:
        load(**given | {name: value}).generate([[1, 2]], Sampling(max_new_tokens=2))

    check(call, name, skip)


@pytest.mark.parametrize("name", ["source", "dtype", "device", "trust_remote_code", "quantized"])
def test_load_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    module = tiny_module()
    check(lambda value: load_model(**{"source": module} | {name: value}), name)


def test_names_of_methods() -> None:
    check(find_method, "method")


@pytest.mark.parametrize("method", METHODS)
def test_options_of_methods(method: str) -> None:
    target, draft = worded(0, max_position_embeddings=12), worded(1, max_position_embeddings=12)
    row = METHODS[method]
    for name in row.options:
        check(lambda value, name=name: Engine(target, draft, row, options={name: value}), name)
    check(lambda value: Engine(target, draft, row, options={value: 1}), "options", unhashable)


def unhashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return True
    return False


@pytest.mark.parametrize(
    ("settings", "equal"),
    [
        ({"temperature": np.float32(0.5)}, {"temperature": 0.5}),
        ({"top_k": np.int64(5), "seed": np.uint8(3)}, {"top_k": 5, "seed": 3}),
        ({"max_new_tokens": np.array(3)}, {"max_new_tokens": 3}),
        ({"temperature": torch.tensor(0.5)}, {"temperature": 0.5}),
        ({"stop": np.int64(3)}, {"stop": 3}),
        ({"stop": [np.int64(3), "x"]}, {"stop": (3, "x")}),
        ({"logit_bias": {np.int64(3): np.float32(0.5)}}, {"logit_bias": {3: 0.5}}),
        ({"forced": {np.int64(0): np.int64(1)}}, {"forced": {0: 1}}),
        (dict.fromkeys(("stop", "logit_bias", "processors", "forced")), {}),
    ],
)
def test_numpy_numbers_and_none_in_sampling(
    settings: dict[str, Any], equal: dict[str, Any]
) -> None:
    sampling = Sampling(**settings)
    assert sampling == Sampling(**equal)
    for name in settings:
        value = getattr(sampling, name)
        assert type(value) is type(getattr(Sampling(**equal), name))


def test_numpy_numbers_and_none_in_the_engine() -> None:
    target = tiny()
    engine = Engine(
        target,
        None,
        METHODS["plain"],
        num_speculative_tokens=np.int64(3),  # type: ignore[arg-type]
        max_batch_size=np.uint8(2),  # type: ignore[arg-type]
        max_memory=np.int64(10**9),  # type: ignore[arg-type]
        draft_confidence=np.float32(0),  # type: ignore[arg-type]
        draft_length=None,
    )
    assert (engine.num_speculative_tokens, engine.max_batch_size) == (3, 2)
    assert type(engine.num_speculative_tokens) is int
    module = tiny_module()
    made = load(module, module, None, device=None, draft_length=None, dtype=None)
    assert made.method.name == "speculative"


def test_modules_that_are_not_language_models() -> None:
    module = tiny_module()
    with pytest.raises(OutriderError, match=r"no language-modelling head.*AutoModelForCausalLM"):
        load(module.model, method="plain")
    with pytest.raises(OutriderError, match="no language-modelling head"):
        HFModel(module.model)
    with pytest.raises(OutriderError, match=r"target \(Linear\) is no transformers model"):
        load(torch.nn.Linear(2, 2), method="plain")  # type: ignore[arg-type]

    class Adapted(torch.nn.Module):
        def merge_and_unload(self) -> None: ...

    with pytest.raises(OutriderError, match="merge_and_unload"):
        load(Adapted(), method="plain")  # type: ignore[arg-type]


def test_a_compiled_module_is_unwrapped() -> None:
    module = tiny_module()
    engine = load(torch.compile(module), torch.compile(tiny_module(seed=1)))  # type: ignore[arg-type]
    assert engine.target.module is module
    assert type(engine.draft.module) is type(module)  # type: ignore[union-attr]
