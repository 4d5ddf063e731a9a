"""The kernels say what torch says, and say it with the same bits in passes of any width."""

import errno
import mmap
import os
from pathlib import Path
from threading import Barrier
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from outrider.core.errors import KernelError, OutriderWarning
from outrider.runtime.kernels import NARROW, build, processors, use_kernels
from outrider.runtime.kernels.build import load_kernels
from outrider.runtime.kernels.grouped import GroupedLinear, rounded
from outrider.runtime.kernels.packing import pack
from outrider.runtime.kernels.pages import Pages

pytestmark = [
    pytest.mark.vector_width,
    pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here"),
]


def linear(inputs: int, outputs: int, bias: bool = True, compact: bool = False) -> nn.Linear:
    """A layer with the kernels; ``compact`` with packed weights."""
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias)
    use_kernels(layer, exact=True, compact=compact)
    return layer


def reference(inputs: int, outputs: int, bias: bool, x: Tensor) -> Tensor:
    """What the same layer says by torch, in float64."""
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias).double()(x.double()).float()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(8, 16), (33, 17), (70, 1), (256, 65), (3, 40), (1, 150)]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compact", [True, False])
def test_linear_equals_torch(inputs: int, outputs: int, bias: bool, compact: bool) -> None:
    """Within 1e-5 of the largest, for widths with every tail, odd sizes among them."""
    layer = linear(inputs, outputs, bias, compact)
    for tokens in (1, 2, 3, 4, 5, 6, 7, 12, 13, 40):
        x = torch.randn(tokens, inputs)
        wanted = reference(inputs, outputs, bias, x)
        assert float((layer(x) - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@torch.inference_mode()
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(131, 70), (7, 3), (64, 160)])
def test_bits_of_a_linear_layer_do_not_depend_on_the_width(
    inputs: int, outputs: int, compact: bool
) -> None:
    layer = linear(inputs, outputs, compact=compact)
    x = torch.randn(50, inputs)
    alone = torch.cat([layer(row[None]) for row in x])
    for width in (*range(2, 21), 33, 50):
        assert torch.equal(torch.cat([layer(part) for part in x.split(width)]), alone)
    assert torch.equal(layer(x.view(5, 10, inputs)), alone.view(5, 10, outputs))


@torch.inference_mode()
def test_packed_weights_are_narrow_only_where_that_changes_no_bit() -> None:
    exact, wide = linear(65, 37), linear(65, 37)
    lossy = linear(65, 37, compact=True)
    for layer in (exact, wide):
        layer.weight.copy_(layer.weight.bfloat16())
    x = torch.randn(9, 65)
    before = exact(x)
    use_kernels(exact, exact=True, compact=True)
    use_kernels(exact)  # what is packed stays so
    named = nn.ModuleDict({"wo": wide})
    use_kernels(named, exact=True, compact=True)  # a name by which T5's dtype has to be kept
    assert exact.weight.dtype == torch.bfloat16
    assert lossy.weight.dtype == wide.weight.dtype == torch.float32
    assert torch.equal(exact(x), wide(x))
    assert float((exact(x) - before).abs().max()) <= 1e-5
    assert torch.equal(exact(x.repeat(9, 1)), exact(x).repeat(9, 1))  # wider than NARROW


@torch.inference_mode()
def test_row_major_weights_go_to_torch_for_wide_passes() -> None:
    layer = linear(64, 32)
    layer.weight = nn.Parameter(layer.weight.bfloat16())
    use_kernels(layer)
    wide = torch.randn(NARROW + 1, 64)  # which takes no mixture of types by itself
    wanted = nn.functional.linear(wide, layer.weight.float(), layer.bias)
    assert float((layer(wide) - wanted).abs().max()) <= 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_joined_layers_say_the_same_bits(compact: bool, bias: bool) -> None:
    """Of other widths each, none of whole panels; in one result."""
    layers = [linear(40, outputs, bias, compact) for outputs in (33, 5, 70)]
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if bias]
    for tokens in (1, 6, 11):
        x = torch.randn(2, tokens, 40)
        joined = torch.ops.outrider.linears(x, weights, biases, [33, 5, 70], NARROW)
        assert torch.equal(joined, torch.cat([layer(x) for layer in layers], -1))


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
def test_torch_computes_joined_layers_for_many_tokens(bias: bool) -> None:
    layers = [linear(40, outputs, bias, False) for outputs in (33, 5, 70)]
    biases = [layer.bias for layer in layers if bias]
    x = torch.randn(2, NARROW, 40)
    weights = [layer.weight for layer in layers]
    joined = torch.ops.outrider.linears(x, weights, biases, [33, 5, 70], NARROW)
    wanted = [nn.functional.linear(x, layer.weight, layer.bias) for layer in layers]
    assert torch.equal(joined, torch.cat(wanted, -1))


@torch.inference_mode()
def test_packing_leaves_the_embeddings_that_share_a_weight_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(50, 24), "head": nn.Linear(24, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    tokens = torch.arange(50)
    before = model["embed"](tokens)
    wanted = model["head"](before)
    use_kernels(model, compact=True)
    assert torch.equal(model["embed"](tokens), before)
    assert float((model["head"](before) - wanted).abs().max()) <= 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("compact", [True, False])
def test_bfloat16_inputs_come_back_as_such(compact: bool) -> None:
    layer = linear(64, 32).bfloat16()
    x = torch.randn(3, 64).bfloat16()
    wanted = nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
    use_kernels(layer, exact=True, compact=compact)
    assert layer(x).dtype == torch.bfloat16
    assert torch.equal(layer(x), wanted.bfloat16()) or float(
        (layer(x).float() - wanted).abs().max()
    ) <= 2**-7 * float(wanted.abs().max())


def attention(width: int = 20) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and a mask of random holes; every query sees its first slot."""
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 7, width), torch.randn(2, 2, 19, width), torch.randn(2, 2, 19, 9)
    mask = torch.zeros(2, 1, 7, 19).masked_fill(torch.rand(2, 1, 7, 19) < 0.5, torch.finfo().min)
    mask[..., 0] = 0.25  # a bias that is not a hole
    return q, k, v, mask


@torch.inference_mode()
@pytest.mark.parametrize("width", [8, 20])
def test_attention_equals_torch(width: int) -> None:
    """Grouped heads, values of another width, biases; within 1e-6."""
    load_kernels()
    q, k, v, mask = attention(width)
    ours = torch.ops.outrider.attend(q, k, v, mask, 0.3).transpose(1, 2)
    double = (x.double() for x in (q, k, v))
    theirs = scaled_dot_product_attention(*double, mask.double(), scale=0.3, enable_gqa=True)
    assert float((ours - theirs).abs().max()) <= 1e-6


@torch.inference_mode()
def test_bits_of_attention_do_not_depend_on_what_is_hidden() -> None:
    """The same slots, with strangers between them and behind them, and one query at a time."""
    load_kernels()
    q, k, v, _ = attention()
    alone = torch.ops.outrider.attend(q, k, v, torch.zeros(2, 1, 7, 19), 0.3)
    spread = [torch.full((*x.shape[:2], 60, x.shape[3]), 7.0) for x in (k, v)]
    places = torch.arange(19) * 3 + 2
    mask = torch.full((2, 1, 7, 60), torch.finfo().min)
    mask[..., places] = 0
    for wide, narrow in zip(spread, (k, v), strict=True):
        wide[:, :, places] = narrow
    assert torch.equal(torch.ops.outrider.attend(q, *spread, mask, 0.3), alone)
    each = [
        torch.ops.outrider.attend(q[:, :, n : n + 1], *spread, mask[:, :, :1], 0.3)
        for n in range(7)
    ]
    assert torch.equal(torch.cat(each, 1), alone)


def test_every_source_is_compiled_once() -> None:
    names = [name for unit in (*build._KERNELS, *build._FEW_BITS) for name in unit]
    assert sorted(names) == [source.stem for source in build.SOURCES]


def test_kernels_for_few_bits_are_compiled_for_the_first_model_that_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_kernels(few_bits=True)
    compiled = []

    def compile_kernels(library: Path, units: object) -> None:
        compiled.append(units)
        library.parent.mkdir(exist_ok=True)
        library.touch()

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_few_bits_are_loaded", False)
    monkeypatch.setattr(build, "compile_kernels", compile_kernels)
    monkeypatch.setattr(build, "_load", Mock())
    assert not build.kernels_are_missing()
    monkeypatch.setattr(build, "kernels_are_loaded", lambda: False)
    assert build.kernels_are_missing()
    model = nn.Sequential(nn.Linear(64, 32))
    use_kernels(model)
    use_kernels(model)
    assert compiled == [build._KERNELS]
    assert not build.kernels_are_missing()
    weight = rounded(torch.randn(32, 64), 8, 32, False)
    use_kernels(nn.Sequential(GroupedLinear(weight, None)))
    assert compiled == [build._KERNELS, build._FEW_BITS]


def test_both_libraries_are_compiled_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other."""
    both = Barrier(2)

    def compile_kernels(library: Path, units: object) -> None:
        both.wait(60)
        library.parent.mkdir(exist_ok=True)
        library.touch()

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "kernels_are_loaded", lambda: False)
    monkeypatch.setattr(build, "_few_bits_are_loaded", False)
    monkeypatch.setattr(build, "compile_kernels", compile_kernels)
    monkeypatch.setattr("ctypes.CDLL", Mock())
    assert load_kernels(few_bits=True)
    assert not load_kernels(few_bits=True)


def test_kernels_are_compiled_without_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; and what a process that was killed has left is removed."""
    compiled: list[Path] = []

    def run(command: list[str]) -> None:
        compiled.append(Path(command[command.index("-o") + 1]))
        compiled[-1].touch()

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "kernels_are_loaded", lambda: False)
    monkeypatch.setattr(build, "_run", run)
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: pytest.fail("they are loaded"))
    library = build._kernels()
    left = [library.with_name(f"{library.name}-1{build._SCRATCH}"), tmp_path / "kernels" / "other"]
    for folder in left:
        folder.mkdir()
    build.compile_missing_kernels()
    assert library.exists()
    assert [folder.exists() for folder in left] == [False, True]
    num = len(compiled)
    build.compile_missing_kernels()
    assert len(compiled) == num > 1


def test_whether_others_can_compile_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")
    assert build.others_compile_kernels()
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert not build.others_compile_kernels()


@pytest.mark.filterwarnings("ignore::outrider.core.errors.OutriderWarning")
def test_others_compile_no_kernels_into_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")
    assert not build.others_compile_kernels()


def test_says_that_there_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelError, match=r"no C\+\+ compiler.*CXX"):
        build.compile_kernels(tmp_path / "kernels.so")


def test_says_what_the_compiler_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing behind that a later run would take for a library."""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(KernelError, match="no such header"):
        build.compile_kernels(tmp_path / "kernels.so")
    monkeypatch.setenv("CXX", os.fspath(tmp_path / "absent"))
    with pytest.raises(KernelError, match="cannot run"):
        build.compile_kernels(tmp_path / "kernels.so")
    assert not list(tmp_path.glob("*.so"))


def test_says_that_it_does_not_know_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are compiled as portable code."""
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "RVV")
    with pytest.warns(OutriderWarning, match="torch reports RVV on this .* portable code"):
        build._warn_of_portable_code()
    assert "-DCPU_CAPABILITY=DEFAULT" in build._flags()


@torch.inference_mode()
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (131, 70), (1, 150), (33, 17)])
@pytest.mark.parametrize("bias", [True, False])
def test_bfloat16_inputs_have_the_bits_of_float32_sums(
    inputs: int, outputs: int, bias: bool
) -> None:
    """Whether the processor multiplies pairs of bfloat16 numbers or widens them: one result for all
    processors, at every width, so that exact models take it."""
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).bfloat16()
    load_kernels()
    pairs = pack(weight, False)
    floats = pack(weight.float(), True)
    assert (pairs.dtype, floats.dtype) == (torch.bfloat16, torch.float32)
    b = torch.randn(outputs) if bias else None
    for tokens in (1, 2, 3, 5, 11, 12, 13, 15, 40):
        x = torch.randn(tokens, inputs).bfloat16()
        wanted = torch.ops.outrider.linear(x.float(), floats, b, outputs, 2**62)
        assert torch.equal(torch.ops.outrider.linear(x.float(), pairs, b, outputs, 2**62), wanted)
        ours = torch.ops.outrider.linear(x, pairs, b, outputs, 2**62)
        assert torch.equal(ours, wanted.bfloat16())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "groups", "queries", "slots", "width", "values"),
    [
        (4, 2, 33, 71, 20, 9),
        (3, 3, 17, 100, 7, 70),
        (9, 3, 64, 64, 64, 64),
        (2, 1, 9, 9, 8, 33),
        (9, 3, 2, 77, 64, 40),
        (2, 2, 5, 150, 32, 64),
    ],
)
def test_wide_attention_equals_torch(
    dtype: torch.dtype, heads: int, groups: int, queries: int, slots: int, width: int, values: int
) -> None:
    """Chains with hidden slots at both ends, as sliding windows have them, for grouped heads;
    within 1e-5, or two units in the last place of bfloat16. The second row sees half as much."""
    load_kernels()
    torch.manual_seed(0)
    q = torch.randn(2, heads, queries, width).to(dtype)
    k, v = (torch.randn(2, groups, slots, size).to(dtype) for size in (width, values))
    position = torch.arange(slots - queries, slots)[:, None]
    slot = torch.arange(slots)
    hidden = (slot > position) | (slot <= position - 40)
    hidden = torch.stack([hidden, hidden | ((slot < slots // 2) & (slot != position))])[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    ours = torch.ops.outrider.attend(q, k, v, mask, 0.2, min(8, queries - 1)).transpose(1, 2)
    double = (x.double() for x in (q, k, v))
    theirs = scaled_dot_product_attention(*double, mask.double(), scale=0.2, enable_gqa=True)
    allowed = 1e-5 if dtype == torch.float32 else 2**-6
    assert ours.dtype == dtype
    assert float((ours - theirs).abs().max()) <= allowed * float(theirs.abs().max())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [3, 20])
def test_wide_attention_reads_no_slot_after_the_last_visible_one(
    dtype: torch.dtype, queries: int
) -> None:
    """Slots that no query token attends to may hold anything, such as what a row with NaN left."""
    load_kernels()
    torch.manual_seed(0)
    q = torch.randn(1, 2, queries, 32).to(dtype)
    k, v = (torch.randn(1, 1, 400, 32).to(dtype) for _ in range(2))
    mask = torch.zeros(1, 1, queries, 400, dtype=dtype)
    mask[..., 21:] = torch.finfo(dtype).min
    wanted = torch.ops.outrider.attend(q, k, v, mask, 0.2, 2)
    k[:, :, 21:], v[:, :, 21:] = torch.nan, torch.nan
    assert torch.equal(torch.ops.outrider.attend(q, k, v, mask, 0.2, 2), wanted)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "values"), [(64, 64), (32, 80), (20, 16)])
def test_bits_of_attention_do_not_depend_on_how_many_queries_share_slots(
    dtype: torch.dtype, width: int, values: int
) -> None:
    """A chain after 150 tokens, of which each row hides others, with three heads per group: as a
    token and a head alone."""
    load_kernels()
    torch.manual_seed(0)
    slots, queries = 157, 7
    q = torch.randn(2, 6, queries, width)
    k, v = (torch.randn(2, 2, slots, size).to(dtype) for size in (width, values))
    hidden = torch.arange(slots) > torch.arange(slots - queries, slots)[:, None]
    hidden = torch.stack([hidden, hidden | (torch.arange(slots) % 9 == 4)])[:, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo().min)
    together = torch.ops.outrider.attend(q, k, v, mask, 0.2)
    alone = [
        torch.ops.outrider.attend(
            q[:, h : h + 1, n : n + 1],
            k[:, h // 3 :][:, :1],
            v[:, h // 3 :][:, :1],
            mask[:, :, n:][:, :, :1],
            0.2,
        )
        for n in range(queries)
        for h in range(6)
    ]
    assert torch.equal(torch.cat(alone, 1).view_as(together), together)


@pytest.mark.parametrize("kind", processors.PROCESSORS, ids=lambda kind: kind.name)
def test_each_kind_of_processor_has_a_build_of_its_own(
    kind: processors.Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "processor", lambda: kind)
    keys = {build.kernels_key()}
    for other in processors.PROCESSORS:
        monkeypatch.setattr(build, "processor", lambda other=other: other)
        keys.add(build.kernels_key())
    assert len(keys) == len(processors.PROCESSORS)


@pytest.mark.parametrize(
    ("capability", "found", "kind"),
    [
        ("DEFAULT", {"avx512_vnni": True}, processors.PORTABLE),
        ("RVV", {}, processors.PORTABLE),
        ("AVX2", {"avx512_vnni": True, "amx_bf16": True, "amx_tile": True}, processors.AVX2),
        ("AVX2", {"avx_vnni": True, "avx512_vnni": True}, processors.AVX2_VNNI),
        ("AVX512", {"avx_vnni": True}, processors.AVX512),
        ("AVX512", {"avx512_vnni": True}, processors.AVX512_VNNI),
        ("AVX512", {"avx512_vnni": True, "avx512_bf16": True}, processors.AVX512_BF16),
        (
            "AVX512",
            dict.fromkeys(("avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile"), True),
            processors.AMX,
        ),
        ("AVX512", {"avx512_vnni": True, "amx_bf16": True}, processors.AVX512_VNNI),
        ("AVX512", {"amx_bf16": True, "amx_tile": True}, processors.AVX512),
    ],
)
def test_the_kind_is_what_the_processor_and_the_user_allow(
    capability: str, found: dict[str, bool], kind: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert processors.processor() is kind


def test_weights_lie_in_small_pages_where_the_system_refuses_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("mmap.mmap", Refusing)
    weight = torch.randn(5, 7)
    assert torch.equal(Pages().parameter(weight), weight)


def test_weights_lie_side_by_side_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as it was packed, whether it fits what is left of a chunk, a new one, or none."""
    monkeypatch.setattr("outrider.runtime.kernels.pages.Pages._CHUNK", 8192)
    widths = (8, 20, 40, 3, 200)
    layers = nn.Sequential(*(nn.Linear(32, width) for width in widths))
    weights = [layer.weight.detach().clone() for layer in layers]
    use_kernels(layers, compact=True)
    for layer, weight in zip(layers, weights, strict=True):
        assert torch.equal(layer.weight, pack(weight, False))
        assert layer.weight.data_ptr() % 64 == 0
    storages = {layer.weight.untyped_storage().data_ptr() for layer in layers}
    assert 1 < len(storages) < len(widths)
