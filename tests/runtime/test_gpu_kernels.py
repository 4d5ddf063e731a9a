"""Triton's kernels compute what torch does in float64, but for roundings."""

import pytest
import torch
from gpu_here import DEVICE, DTYPES, NEEDS_TRITON
from torch import Tensor
from torch.nn import functional

pytestmark = NEEDS_TRITON

SHAPES = [
    (1, 1, 4, 4, 64),
    (2, 3, 9, 3, 64),
    (1, 5, 4, 1, 40),
    (3, 2, 2, 2, 128),
    (1, 8, 8, 1, 16),
    (1, 3, 4, 2, 256),
]
"""Rows, query tokens, heads of queries, heads of keys, width of a head."""


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Two roundings of the largest number, and in float32 the errors of a long sum."""
    ε = torch.finfo(found.dtype).eps
    assert found.shape == wanted.shape
    allowed = (2 if ε > 1e-4 else 16) * ε * float(wanted.abs().max())
    assert float((found.double() - wanted).abs().max()) <= allowed


def rotated_by_torch(x_BNHC: Tensor, cos_BNC: Tensor, sin_BNC: Tensor) -> Tensor:
    x1, x2 = x_BNHC.chunk(2, -1)
    cos_BN1C, sin_BN1C = cos_BNC[:, :, None], sin_BNC[:, :, None]
    return x_BNHC * cos_BN1C + torch.cat([-x2, x1], -1) * sin_BN1C


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("one_row_of_angles", [False, True])
@pytest.mark.parametrize(("B", "N", "Q", "K", "C"), SHAPES)
def test_rotation(
    B: int, N: int, Q: int, K: int, C: int, one_row_of_angles: bool, dtype: torch.dtype
) -> None:
    """With norms and without; keys and values get to their slots, and nothing else is written."""
    from outrider.runtime.kernels.gpu_kernels import HeadNorms, Place, rotated

    qkv_BNHC = random(B, N, Q + 2 * K, C, dtype=dtype)
    rows = 1 if one_row_of_angles else B
    angle_BNC = random(rows, N, C // 2, dtype=torch.float32).repeat(1, 1, 2)
    cos_BNC, sin_BNC = angle_BNC.cos().to(dtype), angle_BNC.sin().to(dtype)
    q_weight, k_weight = random(C, dtype=dtype), random(C + 1, dtype=dtype)[:C]
    slots_BN = torch.stack([torch.randperm(N + 3)[:N] for _ in range(B)]).to(DEVICE)
    rows_B1 = torch.arange(B, device=DEVICE)[:, None]
    for norms in (None, *(HeadNorms(q_weight, k_weight, 1e-3, added) for added in (0.0, 1.0))):
        x_BNHC, x_cos, x_sin = qkv_BNHC.double(), cos_BNC.double(), sin_BNC.double()
        qk_BNHC, v_BNKC = x_BNHC.split([Q + K, K], 2)
        if norms is not None:
            weight_HC = torch.cat([q_weight.expand(Q, C), k_weight.expand(K, C)]).double()
            qk_BNHC = functional.rms_norm(qk_BNHC, (C,), eps=1e-3) * (norms.added + weight_HC)
        q_BNQC, k_BNKC = rotated_by_torch(qk_BNHC, x_cos, x_sin).split([Q, K], 2)
        keys, values = torch.full((2, B + 1, K, N + 3, C), 7.0, dtype=dtype, device=DEVICE)
        place = Place(keys, values, slots_BN)
        assert_near(rotated(qkv_BNHC, Q, cos_BNC, sin_BNC, place, norms), q_BNQC)
        assert_near(keys[rows_B1, :, slots_BN], k_BNKC)
        assert torch.equal(values[rows_B1, :, slots_BN].double(), v_BNKC)
        for buffer in (keys, values):
            buffer[rows_B1, :, slots_BN] = 7
            assert bool((buffer == 7).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", [0.0, 1.0])
@pytest.mark.parametrize("H", [32, 576, 5120])
def test_norms(H: int, added: float, dtype: torch.dtype) -> None:
    from outrider.runtime.kernels.gpu_kernels import normed, normed_sum

    x_BNH, weight_H = random(2, 3, H, dtype=dtype), random(H, dtype=dtype)
    wanted_BNH = functional.rms_norm(x_BNH.double(), (H,), eps=1e-3)
    wanted_BNH *= added + weight_H.double()
    assert_near(normed(x_BNH, weight_H, 1e-3, added), wanted_BNH)
    assert_near(normed(x_BNH.mT.contiguous().mT, weight_H, 1e-3, added), wanted_BNH)
    y_BNH = random(2, 4, H, dtype=dtype)[:, 1:]
    sum_BNH, normed_BNH = normed_sum(x_BNH, y_BNH, weight_H, 1e-3, added)
    assert torch.equal(sum_BNH, x_BNH + y_BNH)
    assert torch.equal(normed_BNH, normed(sum_BNH, weight_H, 1e-3, added))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [7, 64, 256, 700, 1500])
@pytest.mark.parametrize(("B", "N", "Q", "K", "C"), SHAPES)
def test_attention(B: int, N: int, Q: int, K: int, C: int, S: int, dtype: torch.dtype) -> None:
    """Of a part of the KV buffers' slots, a third of them hidden; of long rows, the last shares
    wholly; one query token sees a single slot."""
    from outrider.runtime.kernels.gpu_attention import attended, attends

    q_BQNC = random(B, N, Q, C, dtype=dtype).transpose(1, 2)
    k_BKSC, v_BKSC = random(2, B, K, S + 9, C, dtype=dtype)[:, :, :, :S]
    mask_B1NS = torch.zeros(B, 1, N, S, dtype=dtype, device=DEVICE)
    least = torch.finfo(dtype).min
    mask_B1NS.masked_fill_(random(B, 1, N, S, dtype=torch.float32) < -0.4, least)
    mask_B1NS[..., 0] = 0
    mask_B1NS[..., 300:] = least
    mask_B1NS[-1, :, -1, 1:] = least
    assert attends(q_BQNC, k_BKSC, v_BKSC, mask_B1NS)
    keys, values = (each.double().repeat_interleave(Q // K, 1) for each in (k_BKSC, v_BKSC))
    hidden_B1NS = mask_B1NS < -1
    scores_BQNS = (0.3 * q_BQNC.double() @ keys.mT).masked_fill(hidden_B1NS, -torch.inf)
    wanted_BQNC = scores_BQNS.softmax(-1) @ values
    found_BNQC = attended(q_BQNC, k_BKSC, v_BKSC, mask_B1NS, 0.3)
    assert_near(found_BNQC, wanted_BQNC.transpose(1, 2))
    of_all_B11S = mask_B1NS[:1, :, :1]
    as_many_B1NS = of_all_B11S.repeat(B, 1, N, 1)
    found_BNQC = attended(q_BQNC, k_BKSC, v_BKSC, of_all_B11S, 0.3)
    assert torch.equal(found_BNQC, attended(q_BQNC, k_BKSC, v_BKSC, as_many_B1NS, 0.3))


@pytest.mark.parametrize(
    ("width", "dtype", "queries", "slots"),
    [
        (64, torch.bfloat16, 64, 64),
        (128, torch.bfloat16, 64, 64),
        (256, torch.bfloat16, 64, 32),
        (64, torch.float32, 64, 64),
        (80, torch.float32, 64, 32),
        (192, torch.float32, 32, 16),
        (256, torch.float32, 32, 16),
    ],
)
def test_blocks_fit_into_shared_memory(
    width: int, dtype: torch.dtype, queries: int, slots: int
) -> None:
    """Queries take 32 KiB at most, keys and values of a step as much."""
    from outrider.runtime.kernels.gpu_attention import most_queries, slots_per_step

    assert (most_queries(width, dtype), slots_per_step(width, dtype)) == (queries, slots)


def test_other_attention_is_left_to_torch() -> None:
    """Of many queries, of values of another width, of float64, with a mask that is not added."""
    from outrider.runtime.kernels.gpu_attention import attends

    def of(N: int = 16, value: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        q, k, v, mask = (1, 8, N, 16), (1, 2, 8, 16), (1, 2, 8, value), (1, 1, N, 8)
        return [torch.zeros(shape, dtype=dtype) for shape in (q, k, v, mask)]

    assert attends(*of())
    assert not attends(*of(N=17))
    assert not attends(*of(value=8))
    assert not attends(*of(dtype=torch.float64))
    assert not attends(*of()[:3], torch.ones(1, 1, 16, 8, dtype=torch.bool))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("F", [100, 1024, 1536])
def test_gated_activations(F: int, dtype: torch.dtype) -> None:
    from outrider.runtime.kernels.gpu_kernels import gated

    gate_up = random(2, 3, 2 * F, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert_near(gated(gate_up, "silu"), functional.silu(gate) * up)
    wanted = functional.gelu(gate, approximate="tanh") * up
    assert_near(gated(gate_up, "gelu_tanh"), wanted)
