"""What all layers of a model read is computed once by a compiled program.

Legend: B rows, H heads, N query tokens, C width of a head.
"""

import re
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export

from outrider.runtime.attention_metadata import chain_mask
from outrider.runtime.executors.compile_cache import compiled_program
from outrider.runtime.kernels import NARROW, use_kernels
from outrider.runtime.kernels.build import find_compiler, load_kernels
from outrider.runtime.kernels.graph_passes import compute_angles_once

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")

LAYERS, WIDTH = 3, 16


class Layers(nn.Module):
    """Layers that rotate the same tokens by the same angles and attend with the same mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        use_kernels(self.linear)

    def forward(self, x_BHNC: Tensor, position_BN: Tensor) -> Tensor:
        mask = chain_mask(position_BN, x_BHNC.shape[2], torch.float32)
        angle_B1NC = position_BN[:, None, :, None] / (1 + torch.arange(WIDTH))
        cos, sin = angle_B1NC.cos(), angle_B1NC.sin()
        for _ in range(LAYERS):
            y_BHNC = x_BHNC * cos + x_BHNC.roll(1, -1) * sin
            y_BNHC = torch.ops.outrider.attend(y_BHNC, y_BHNC, x_BHNC, mask, 0.5, NARROW)
            x_BHNC = self.linear(y_BNHC.transpose(1, 2))
        return x_BHNC


@pytest.mark.slow
def test_masks_and_angles_are_not_computed_for_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    module, rows, tokens = Layers(), Dim("rows"), Dim("tokens")
    sizes = {0: rows, 2: tokens}, {0: rows, 1: tokens}
    inputs = [torch.randn(2, 4, 5, WIDTH), torch.arange(5).repeat(2, 1)]
    with torch.no_grad():
        program = compiled_program(
            module, lambda: export(module, tuple(inputs), dynamic_shapes=sizes), own=True
        )
        torch.testing.assert_close(program(inputs)[0], module(*inputs), rtol=1e-5, atol=1e-5)
    (path,) = tmp_path.glob("programs/*.pt2")
    with ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".wrapper.cpp")]
        code = "".join(archive.read(name).decode() for name in names)
    masks = re.findall(r"aoti_torch_cpu_attend\(.*\b(buf\d+)\b.*, 0\.5, ", code)
    assert len(masks) == LAYERS
    assert len(set(masks)) == 1
    for function in ("cos", "sin"):
        assert code.count(f"CHECK(aoti_torch_cpu_{function}(") == 1


@pytest.mark.parametrize(
    ("dtype", "layers", "ours"),
    [(torch.float32, 2, True), (torch.float32, 1, False), (torch.float64, 2, False)],
)
def test_angles_of_one_layer_and_of_other_types_stay_as_they_are(
    dtype: torch.dtype, layers: int, ours: bool
) -> None:
    """For one layer a call would take longer; and our kernel computes in float32, where a
    program's float64 would lose its digits."""
    load_kernels()
    graph = fx.Graph()
    given = graph.placeholder("angles")
    for function in (torch.ops.aten.cos.default, torch.ops.aten.sin.default):
        node = graph.call_function(function, (given,))
        node.meta["val"] = torch.empty(1, dtype=dtype)
        scaled = graph.call_function(torch.ops.aten.mul.Scalar, (node, 1.0))
        for _ in range(2 * layers):  # queries and keys
            graph.call_function(torch.ops.aten.neg.default, (scaled,))
    compute_angles_once(graph)
    operators = torch.ops.outrider if ours else torch.ops.aten
    targets = {node.target for node in graph.nodes}
    assert {operators.cos.default, operators.sin.default} < targets
