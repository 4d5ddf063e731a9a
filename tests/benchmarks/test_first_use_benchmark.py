"""The benchmark of the first use: the time of each program, and the page."""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from benchmarks import first_use
from outrider.core.errors import OutriderWarning
from outrider.engine import compiler_process
from outrider.runtime.kernels import use_kernels


def test_each_program_is_timed_and_warnings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(target: str, *_: Any, report: Any, **__: Any) -> None:
        report("compiling, once: passes of target /a/folder/target", 0.0)
        warnings.warn("it differs", OutriderWarning, stacklevel=1)
        report("compiling, once: rule Greedy", 0.5)

    monkeypatch.setattr(outrider, "load", load)
    found = first_use.load("speculative", "bfloat16", 1)
    named = [stage["what"] for stage in found["stages"]]
    assert named == [first_use.KERNELS, "passes of target", "rule Greedy"]
    assert found["warnings"] == ["it differs"]
    wall, busy = first_use.total(found)
    assert wall >= 0
    assert busy >= 0


def test_the_page_shows_both_loads() -> None:
    stages = [{"what": "rule Greedy", "wall": 9.0, "python": 3.0, "compilers": 5.0}]
    about = {"date": "d", "hardware": "h", "threads": 2, "torch": "t", "load": 0}
    about |= {"command": "c", "method": "m", "target": "t"}
    first = {"stages": stages * 2, "warnings": ["it differs"]}
    second = {"stages": [stages[0] | {"wall": 0.5, "compilers": 0.0}], "warnings": []}
    tokens = {"seconds": {"first token": 4.0, "first compiled token": 21.0}, "missing": 1}
    later = {"seconds": {"first compiled token": 2.5, "all programs": 3.5}}
    runs = [{"dtype": "bfloat16", "first": first, "second": second, "background": tokens}]
    runs[0]["later"] = later
    page = first_use.markdown({"about": about, "runs": runs})
    assert page.startswith("# First use, t\n\nd, h, 2 threads, torch t; `compile=")
    assert "First use 18 s (16 s of processor time); later loads 0.5 s (3.0 s)." in page
    assert "A later start gives its first token after 2.5 s" in page
    assert page.count("| rule Greedy | 9.0 | 3.0 | 5.0 |") == 2
    assert "first token after 4 s; first compiled token after 21 s; 1 programs missing" in page
    assert "Warning: it differs" in page


def test_the_first_tokens_are_timed_until_all_programs_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels are taken over within the second output, the programs of the target's layers
    within the third one, and that of its forward pass within the fourth one."""

    class Compiler:
        num_missing, waits = 0, 0

        @property
        def is_running(self) -> bool:
            return self.waits < 3

        def wait(self, seconds: float) -> None:
            self.waits += 1

    class Compiled:
        has_programs = has_forward = False

        def has_chain(self, layers: tuple[int, ...]) -> bool:
            return self.has_forward

    class Engine:
        compiler = Compiler()
        target = SimpleNamespace(compiled=Compiled(), hidden_layers=(), module=nn.Linear(2, 2))
        outputs = 0

        def stream(self, prompt: str, sampling: object) -> Iterator[int]:
            self.outputs += 1
            yield 1
            if self.outputs >= 2:
                use_kernels(self.target.module)
            self.target.compiled.has_programs = self.outputs >= 3
            self.target.compiled.has_forward = self.outputs >= 4
            yield 2

    engine = Engine()
    monkeypatch.setattr(outrider, "load", lambda *_, **settings: engine)
    monkeypatch.setattr(compiler_process, "begin_ahead", lambda: None)
    found = first_use.first_tokens("speculative", "bfloat16", torch.get_num_threads())
    named = ["first token", "first token by kernels"]
    named += ["first token of compiled layers", "first compiled token"]
    assert list(found["seconds"]) == [*named, "all programs"]
    assert list(found["speeds"]) == named
    assert engine.outputs == 4
    assert found["missing"] == 0
