"""A model's layers on a GPU by fewer kernels, its code otherwise unmodified.

Over few tokens, a layer's time is that of reading its weights, and of starting some thirty kernels,
most of which read and write a few kilobytes: norms, rotary embedding, activations, sums. Here they
are less than half as many.
"""

import warnings
from importlib.util import find_spec

from torch import nn

from outrider.core.errors import OutriderWarning
from outrider.runtime.kernels.fused_norms import use_fused_norms


def use_fused_layers(module: nn.Module, name: str) -> None:
    """Lets norms, MLPs and attention layers of a module run by fewer kernels where they compute
    what ours do. Without Triton, which torch's CUDA builds bring along, norms alone.

    Args:
        module: a model on a GPU; methods of its layers are replaced, and weights moved together.
        name: how messages call it.
    """
    use_fused_norms(module)
    if find_spec("triton") is None:
        return
    # importing them takes as long as transformers does
    from outrider.runtime.kernels.fused_attention import use_fused_attention
    from outrider.runtime.kernels.fused_mlp import use_fused_mlps
    from outrider.runtime.kernels.fused_residuals import use_fused_residuals

    try:
        from outrider.runtime.kernels.gpu_kernels import ADDED, normed

        use_fused_norms(module, normed, ADDED)
        use_fused_mlps(module)
        use_fused_attention(module)
        use_fused_residuals(module)
    except Exception as error:  # Triton's and its compilers' exceptions are of many kinds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(
            f"{name} runs by torch's own kernels, which is slower: Triton does not compile ours: "
            f"{reason[0]}",
            OutriderWarning,
            stacklevel=3,
        )
