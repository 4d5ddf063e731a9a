"""Where Triton's kernels run in tests: on a GPU, or by Triton's interpreter on a CPU."""

import os
from importlib.util import find_spec

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_RUNS = find_spec("triton") and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
NEEDS_TRITON = pytest.mark.skipif(
    not _RUNS, reason="no GPU here, nor Triton and TRITON_INTERPRET=1 in the environment"
)

DTYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":
    DTYPES.append(torch.bfloat16)  # which the interpreter does not multiply
