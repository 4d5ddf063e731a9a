"""A compiled program that rounds otherwise is used in any precision; one that is wrong in none."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from interpreted_graphs import untraced
from tiny_models import tiny
from torch import Tensor
from torch.export import ExportedProgram

from outrider.core.errors import OutriderWarning
from outrider.runtime import HFModel
from outrider.runtime.executors.compile_cache import Program
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.fused_draft import GreedyDraft, SampledDraft
from outrider.runtime.executors.parity import compare
from outrider.runtime.executors.prepare import stages
from outrider.runtime.executors.traced import ChainForward, NodesForward, TreeForward
from outrider.runtime.executors.traced_cache import KVBuffers
from outrider.runtime.hf.quantize import quantize
from outrider.runtime.kernels.build import find_compiler

DEPTH = 4
Spoil = Callable[[TreeForward, list[Tensor]], list[Tensor]]
HALVES = (torch.bfloat16, torch.float16)


def pass_of(model: HFModel, kind: type[TreeForward]) -> TreeForward:
    settings = model.module, model.spec
    return kind(*settings, DEPTH) if issubclass(kind, GreedyDraft) else kind(*settings)


def buffers_of(model: HFModel) -> KVBuffers:
    buffers = model.example_cache().in_use()
    half = len(buffers) // 2
    return buffers[:half], buffers[half:]


def spoiled(each: TreeForward, spoil: Spoil) -> Program:
    """The pass itself, its results changed."""
    right = untraced(each)
    return lambda inputs: spoil(each, right(inputs))


def logits_times(factor: float, each: TreeForward, outputs: list[Tensor]) -> list[Tensor]:
    """As if the model had computed other logits: distributions and tokens follow from them."""
    first, total_B, *chain = outputs
    if not isinstance(each, SampledDraft):
        return [first * factor, total_B, *chain]
    return [(first.clamp(min=1e-38).log() * factor).softmax(-1), total_B, *chain]


def noise(size: float, each: TreeForward, outputs: list[Tensor]) -> list[Tensor]:
    """Logits with an error of that size in no particular direction."""
    wide_BNV = outputs[0].float()
    error_BNV = torch.randn(wide_BNV.shape, generator=torch.Generator().manual_seed(3))
    error_BNV *= size * wide_BNV.norm() / error_BNV.norm()
    return [(wide_BNV + error_BNV).to(outputs[0].dtype), *outputs[1:]]


def other_position(each: TreeForward, outputs: list[Tensor]) -> list[Tensor]:
    """The logits of one position in place of another's."""
    logits_BNV = outputs[0].clone()
    logits_BNV[-1, -1] = logits_BNV[0, 0]
    return [logits_BNV, *outputs[1:]]


def one_token_too_far(each: TreeForward, outputs: list[Tensor]) -> list[Tensor]:
    """Tokens that are not those of the recorded distributions."""
    chain_BN = outputs[2].clone()
    chain_BN[:, -1] = (chain_BN[:, -1] + 1) % outputs[0].shape[2]
    return [*outputs[:2], chain_BN]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mixtral"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_a_program_that_rounds_otherwise_agrees(family: str, dtype: torch.dtype) -> None:
    """A model in float32 rounds nothing that one with the same weights in bfloat16 rounds: no
    program is further away from it. Drafts give float32 numbers in every precision."""
    model, exact = tiny(family, dtype=dtype), tiny(family)
    exact.module.load_state_dict(model.module.state_dict())
    for kind in (ChainForward, TreeForward, NodesForward, GreedyDraft):
        each, other = pass_of(model, kind), untraced(pass_of(exact, kind))

        def widened(inputs: list[Tensor], run: Program = other) -> list[Tensor]:
            return run([x.float() if x.dtype == dtype else x for x in inputs])

        assert compare(each, widened, buffers_of(model)) == ""


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    "kind", [ChainForward, TreeForward, NodesForward, GreedyDraft, SampledDraft]
)
@pytest.mark.parametrize("factor", [0.99, 1.01, 1.05])
def test_a_program_that_is_one_percent_wrong_is_found(
    kind: type[TreeForward], dtype: torch.dtype, factor: float
) -> None:
    model = tiny(dtype=dtype)
    each, buffers = pass_of(model, kind), buffers_of(model)
    assert compare(each, spoiled(each, lambda _, outputs: outputs), buffers) == ""
    assert compare(each, spoiled(each, partial(logits_times, factor)), buffers)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("kind", [ChainForward, TreeForward, NodesForward])
@pytest.mark.parametrize("spoil", [partial(noise, 0.05), other_position])
def test_errors_that_have_no_direction_are_found(
    kind: type[TreeForward], dtype: torch.dtype, spoil: Spoil
) -> None:
    model = tiny(dtype=dtype)
    each, buffers = pass_of(model, kind), buffers_of(model)
    assert "largest at position" in compare(each, spoiled(each, spoil), buffers)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [ChainForward, GreedyDraft])
def test_layers_that_round_their_inputs_are_allowed_more(
    kind: type[TreeForward], dtype: torch.dtype
) -> None:
    """But not a wrong factor, nor other logits."""
    model = tiny(dtype=dtype)
    quantize(model.module, "int8:32+a8")
    each, buffers = pass_of(model, kind), buffers_of(model)
    assert compare(each, spoiled(each, partial(logits_times, 1.01)), buffers) == ""
    found = compare(each, spoiled(each, partial(logits_times, 1.05)), buffers)
    assert "with inputs of 8 bits" in found
    assert compare(each, spoiled(each, partial(noise, 0.2)), buffers)


@pytest.mark.parametrize("kind", [GreedyDraft, SampledDraft])
def test_tokens_must_follow_from_what_is_recorded(kind: type[TreeForward]) -> None:
    model = tiny(dtype=torch.bfloat16)
    each = pass_of(model, kind)
    assert "do not follow" in compare(each, spoiled(each, one_token_too_far), buffers_of(model))


def make_all(model: HFModel) -> None:
    for _, make in stages(model, (DEPTH,)):
        make()


def test_the_warning_says_which_program_is_off_and_by_how_much() -> None:
    """Other programs of the model are used."""

    def wrong_when_sampled(each: TreeForward, trace: Callable[[], ExportedProgram]) -> Program:
        if isinstance(each, SampledDraft):
            return spoiled(each, partial(logits_times, 1.2))
        return untraced(each)

    model = tiny(dtype=torch.bfloat16, name="small")
    model.compiled = CompiledExecutor(model.module, model.spec, model.name, wrong_when_sampled)
    expected = (
        r"^small: the sampled draft program compiled, but its results differ from the model's: "
        r"error .*% of the logits' size where 3.12% is allowed in bfloat16, largest at position "
        r"\d+ of \d+: .*%; runs eagerly$"
    )
    with pytest.warns(OutriderWarning, match=expected) as seen:
        make_all(model)
    assert len(seen) == 1
    assert not model.compiled.failed


def test_the_warning_says_when_a_program_fails() -> None:
    def breaking(each: TreeForward, trace: Callable[[], ExportedProgram]) -> Program:
        def graph(inputs: list[Tensor]) -> list[Tensor]:
            raise RuntimeError("no such symbol\nand more")

        return graph

    model = tiny(name="small")
    model.compiled = CompiledExecutor(model.module, model.spec, model.name, breaking)
    with pytest.warns(OutriderWarning, match="compiled, but it fails when it is run: no such symb"):
        stages(model)[0][1]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stages(model)[0][1]()
