"""Inductor tries no instruction set for which our kernels have been compiled."""

from typing import Any

import pytest
from torch._inductor.cpu_vec_isa import VecAMX, VecAVX512, VecAVX512VNNI, VecISA

from outrider.runtime.executors import instruction_sets
from outrider.runtime.executors.instruction_sets import instruction_sets_known
from outrider.runtime.kernels.processors import AMX, AVX512_BF16, AVX512_VNNI


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flags of the programs that Inductor compiles to see whether the compiler knows them; it
    knows none."""
    found: list[str] = []

    def check_build(self: Any, code: str) -> bool:
        found.append(self.build_arch_flags())
        return False

    monkeypatch.setattr(VecISA, "check_build", check_build)
    monkeypatch.setattr(instruction_sets, "kernels_are_loaded", lambda: True)
    return found


class WithFp16(VecAMX):
    """As on a processor whose matrix unit multiplies half precision."""

    _arch_flags = VecAMX._arch_flags + " -mamx-fp16"


@pytest.mark.parametrize(
    ("processor", "known", "unknown"),
    [
        (AVX512_VNNI, [VecAVX512VNNI], [VecAMX]),
        (AVX512_BF16, [VecAVX512VNNI, VecAVX512], [VecAMX]),
        (AMX, [VecAVX512VNNI, VecAMX], [WithFp16]),
    ],
)
def test_only_what_the_kernels_do_not_use_is_tried(
    processor: Any,
    known: list[type[VecISA]],
    unknown: list[type[VecISA]],
    tried: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instruction_sets, "processor", lambda: processor)
    with instruction_sets_known():
        assert all(kind().check_build("code") for kind in known)
        assert not tried
        assert not any(kind().check_build("code") for kind in unknown)
    assert len(tried) == len(unknown)


def test_all_are_tried_without_kernels(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "processor", lambda: AMX)
    monkeypatch.setattr(instruction_sets, "kernels_are_loaded", lambda: False)
    with instruction_sets_known():
        assert not VecAVX512VNNI().check_build("code")
    assert tried


def test_inductor_is_as_before_afterwards() -> None:
    before = VecISA.check_build
    with pytest.raises(RuntimeError, match="compiler"), instruction_sets_known():
        raise RuntimeError("the compiler fails")
    assert VecISA.check_build is before
