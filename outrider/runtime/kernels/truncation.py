"""The truncation of distributions that compiled programs consist of: a kernel on a CPU, which ranks
only the tokens that may be kept; elsewhere torch's own operators, which rank all.

Legend: B rows, M positions, V vocabulary.
"""

import torch
from torch import Tensor

from outrider.runtime.kernels.build import kernels_are_loaded
from outrider.sampling.truncate import Truncation
from outrider.sampling.truncate import truncated as truncated_by_rank


def truncated(p_BMV: Tensor, by: Truncation) -> Tensor:
    """``sampling.truncate.Truncate``, by the kernel where it is loaded and can compute it."""
    if p_BMV.device.type == "cpu" and p_BMV.dtype == torch.float32 and kernels_are_loaded():
        kept_BMV: Tensor = torch.ops.outrider.truncated(p_BMV, *by)
        return kept_BMV
    return truncated_by_rank(p_BMV, by)
