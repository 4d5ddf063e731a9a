"""A token's bits do not depend on its company: by how they are computed, at every vector width.

The sizes here leave a rest at every width that processors have: no dimension is a multiple of 8.
"""

import contextlib
from collections.abc import Callable

import pytest
import torch
from exact_outputs import assert_exact, near
from interpreted_graphs import interpreted
from tiny_models import tiny
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import OutriderWarning, UnsupportedModelError
from outrider.runtime import HFModel
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.prepare import prepare, stages
from outrider.runtime.kernels import build
from outrider.runtime.kernels.build import load_kernels
from outrider.runtime.kernels.exact import (
    exact_mode,
    inexact_operator,
    is_exact_mode,
    use_exact_operators,
)
from outrider.runtime.prefill import unsampled_context

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")
vector_width = pytest.mark.vector_width  # of the tests that run code which depends on it

ODD: dict[str, int] = {"hidden_size": 36, "intermediate_size": 52, "head_dim": 10, "vocab_size": 91}
DTYPES = [torch.float32, torch.bfloat16]

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "cos": torch.cos,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:], WEIGHT.to(x), BIAS.to(x)),
}
WIDTH = 77
WEIGHT, BIAS = torch.linspace(0.5, 2, WIDTH), torch.linspace(-1, 1, WIDTH)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_kernels()


@vector_width
@pytest.mark.parametrize("largest", [4, 100, 4000, 1e6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_the_same_bits_in_any_company(
    name: str, dtype: torch.dtype, largest: float
) -> None:
    """Also of larger numbers, which may take other steps than small ones."""
    scale_B1 = torch.tensor([4, largest]).repeat(12)[:23, None]
    x = (scale_B1 * torch.randn(23, WIDTH)).to(dtype)
    with exact_mode():
        alone = torch.cat([OPERATORS[name](row[None]) for row in x])
        for width in (2, 5, 6, 23):
            found = torch.cat([OPERATORS[name](part) for part in x.split(width)])
            assert torch.equal(found, alone)
        strided = torch.stack([x, x], -1)[..., 0]
        assert torch.equal(OPERATORS[name](strided), alone)


@vector_width
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compute_what_torch_computes(name: str, dtype: torch.dtype) -> None:
    """Within eight roundings of a number near 1, or of a larger result, from float64."""
    x = (4 * torch.randn(3, WIDTH)).to(dtype)
    wanted = OPERATORS[name](x.double())
    with exact_mode():
        found = OPERATORS[name](x)
    assert found.dtype == dtype
    error = (found.double() - wanted).abs()
    assert bool((error <= 8 * torch.finfo(dtype).eps * wanted.abs().clamp(min=1)).all())


@vector_width
def test_threads_share_work_without_changing_a_bit() -> None:
    x = torch.randn(300, 501)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with exact_mode():
                results.append([functional.silu(x), x.mean(-1, keepdim=True)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_exact_mode_ends_with_its_context() -> None:
    """Nested ones too, and those that an exception ends."""
    assert not is_exact_mode()
    with exact_mode():
        with contextlib.suppress(RuntimeError), exact_mode():
            torch.ones(2) @ torch.ones(3)
        assert is_exact_mode()
    assert not is_exact_mode()


@vector_width
def test_other_dtypes_are_computed_by_torch() -> None:
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    for operator in OPERATORS.values():
        with exact_mode():
            found = operator(x)
        assert torch.equal(found, operator(x))


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (lambda x: functional.silu(x) * x + x / 2 - x.pow(2), None),
        (lambda x: torch.cat([x, x], 1).transpose(0, 1).float().rsqrt(), None),
        (lambda x: x[:, :1] @ x[:1], None),  # one product a number: nothing is summed
        (lambda x: x @ x.mT, "aten.matmul.default"),
        (lambda x: torch.softmax(x, -1), "aten.softmax.int"),
        (lambda x: torch.erf(x), "aten.erf.default"),
        (lambda x: x.clone().exp_(), "aten.exp_.default"),
        (lambda x: x.sum(0), "aten.sum.dim_IntList"),
        (lambda x: torch.add(x, x, alpha=0.3), "aten.add.Tensor"),
        (lambda x: x.pow(1.5), "aten.pow.Tensor_Scalar"),
        (lambda x: x.bfloat16().rsqrt(), "aten.rsqrt.default"),
        (lambda x: torch.complex(x, x) * 2, "aten.complex.default"),
    ],
)
@torch.inference_mode()
def test_names_the_first_operator_that_is_not_exact(
    run: Callable[[Tensor], Tensor], found: str | None
) -> None:
    x = torch.rand(4, 5)

    def within() -> None:
        with exact_mode():
            run(x)

    assert inexact_operator(within) == found
    assert inexact_operator(lambda: run(x)) is None  # outside exact mode nothing is watched


@vector_width
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_sizes_are_exact(family: str, dtype: torch.dtype) -> None:
    """Sizes that leave a rest at every vector width; chains and trees, alone and in batches."""
    target = tiny(family, dtype=dtype, **ODD)
    draft = near(family, dtype=dtype, **ODD)
    prepare(target, exact=True)
    assert_exact(target, draft)


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "gemma2"])
def test_models_with_other_products_are_refused_by_name(family: str) -> None:
    """Experts, transposed layers and attention with a soft cap multiply by the libraries."""
    with pytest.raises(UnsupportedModelError, match=r"computes with aten\.(linear|addmm|matmul)"):
        prepare(tiny(family), exact=True)


def test_an_activation_that_is_not_exact_is_refused_by_name() -> None:
    """Whether or not its bits happen to agree at the sizes that are tried."""

    class Erf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erf(x)

    model = tiny()
    model.module.model.layers[1].mlp.act_fn = Erf()
    with pytest.raises(UnsupportedModelError, match=r"computes with aten\.erf\.default"):
        prepare(model, exact=True)


def exported(module: nn.Module, *inputs: Tensor) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module.eval(), inputs, strict=False)


@vector_width
def test_programs_get_the_kernels() -> None:
    class Every(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [torch.cat([operator(x) for operator in OPERATORS.values()], -1)]

    x = torch.randn(3, WIDTH)
    program = use_exact_operators(exported(Every(), x))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {f"outrider.{name}.default" for name in OPERATORS} <= names
    with exact_mode():
        wanted = Every()(x)
    for one, other in zip(program.module()(x), wanted, strict=True):
        assert torch.equal(one, other)


def test_programs_with_other_operators_are_refused() -> None:
    class Softmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * torch.softmax(x, -1)

    with pytest.raises(UnsupportedModelError, match="softmax"):
        use_exact_operators(exported(Softmax(), torch.randn(3, WIDTH)))


def odd_pair(dtype: torch.dtype) -> tuple[HFModel, HFModel]:
    """Target and draft of one layer, which a compiler is soon done with."""
    sizes = ODD | {"num_hidden_layers": 1}
    return tiny(dtype=dtype, **sizes), near(dtype=dtype, **sizes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_traced_passes_are_exact(dtype: torch.dtype) -> None:
    """By the program that would be compiled, run by torch."""
    target, draft = odd_pair(dtype)
    prepare(target, exact=True)
    target.compiled = CompiledExecutor(target.module, target.spec, "exact", interpreted, exact=True)
    assert_exact(target, draft)
    assert not target.compiled.failed


@torch.inference_mode()
def last_logits(model: HFModel) -> Tensor:
    """Logits of a pass over six tokens behind six others, (N, V)."""
    tokens = [7 * i % model.num_tokens for i in range(12)]
    context = unsampled_context(model, tokens)
    cache = model.start(unsampled_context(model, tokens[:7]))
    return model.extend(cache, context.tokens_BT[:, 6:])[0]


@vector_width
@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.vector_loops)]
)
def test_compiled_passes_are_exact(dtype: torch.dtype, recwarn: pytest.WarningsRecorder) -> None:
    """Kernels and the code generator together; bit for bit what the same model computes eagerly, so
    that it does not matter which of a batch's passes have a program."""
    target, draft = odd_pair(dtype)
    prepare(target, "auto", exact=True, own=True)
    for _, make in stages(target):
        make()
    assert_exact(target, draft)
    assert target.compiled is not None
    assert not target.compiled.failed
    compiled_NV = last_logits(target)
    target.compiled = None
    assert torch.equal(compiled_NV, last_logits(target))
    warned = [str(each.message) for each in recwarn if issubclass(each.category, OutriderWarning)]
    assert not warned
