"""Kernels for GPUs are used once they have computed an example as torch's operators do.

Triton compiles on the user's machine, for its GPU and by its C compiler, so that any of them may
fail. Torch's operators then compute the same, more slowly, after a warning.
"""

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

from outrider.core.errors import OutriderWarning

Computes = TypeVar("Computes", bound=Callable[..., object])


def kernel_or_torch(
    kernel: Callable[[], Computes],
    by_torch: Computes,
    agree: Callable[[Computes, Computes], bool],
    purpose: str,
) -> Computes:
    """The kernel, if there is Triton and it agrees with torch's operators; else these.

    Args:
        kernel: imports the module of the kernel and returns it.
        by_torch: the same by torch's operators.
        agree: whether both compute the same of an example.
        purpose: what the kernel does, for the warning.
    """
    if find_spec("triton") is None:
        return by_torch
    try:
        found = kernel()
        reason = "" if agree(found, by_torch) else "it computes something else"
    except Exception as error:  # the compiler's are of many kinds
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if not reason:
        return found
    warnings.warn(
        f"the kernel that {purpose} does not work on this GPU, so torch's slower operators do it: "
        f"{reason}",
        OutriderWarning,
        stacklevel=4,
    )
    return by_torch
