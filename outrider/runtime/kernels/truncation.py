"""The truncation of distributions that compiled programs consist of: a kernel on a CPU, which ranks
only the tokens that may be kept; one on a GPU, which ranks none; elsewhere torch's own operators,
which rank all.

Legend: B rows, M positions, V vocabulary.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.compiler import is_compiling

from outrider.runtime.kernels.build import kernels_are_loaded
from outrider.runtime.kernels.checked_on_gpu import kernel_or_torch
from outrider.sampling.truncate import Truncate, Truncation
from outrider.sampling.truncate import truncated as truncated_by_rank


def truncated(p_BMV: Tensor, by: Truncation) -> Tensor:
    """``sampling.truncate.Truncate``, by a kernel where there is one for the device and the
    precision."""
    if p_BMV.dtype != torch.float32:
        return truncated_by_rank(p_BMV, by)
    if p_BMV.device.type == "cpu" and kernels_are_loaded():
        kept_BMV: Tensor = torch.ops.outrider.truncated(p_BMV, *by)
        return kept_BMV
    if p_BMV.device.type == "cuda" and not is_compiling():
        return truncate_on(p_BMV.device)(p_BMV, by)
    return truncated_by_rank(p_BMV, by)


@lru_cache(maxsize=8)
def truncate_on(device: torch.device) -> Truncate:
    """What truncates distributions in float32 on a GPU."""
    p_BMV, by = _example(device)
    by_torch: Truncate = truncated_by_rank

    def agree(found: Truncate, wanted: Truncate) -> bool:
        return torch.allclose(found(p_BMV, by), wanted(p_BMV, by), rtol=1e-4, atol=1e-6)

    return kernel_or_torch(_kernel, by_torch, agree, "applies top-k, top-p and min-p")


def _kernel() -> Truncate:
    from outrider.runtime.kernels import gpu_truncation

    return gpu_truncation.truncated


def _example(device: torch.device) -> tuple[Tensor, Truncation]:
    """Distributions without ties, (4, 2, 1500), and parameters of each kind."""
    wave_BMV = (torch.arange(12000, device=device) * 0.7).sin().view(4, 2, 1500)
    none = [False] * 4
    by = Truncation.of([0, 9, 0, 0], [1.0, 1.0, 0.83, 1.0], none, [0.0, 0.0, 0.0, 0.03], device)
    return (6 * wave_BMV).softmax(-1), by
