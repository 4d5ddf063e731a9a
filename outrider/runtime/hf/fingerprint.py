"""A hash that tells models apart without reading all of their weights."""

import hashlib
from typing import Any

from torch import nn

_VALUES = 4096  # of each parameter


def fingerprint(module: nn.Module) -> str:
    """A hash of a module's configuration, if it has one, and of values sampled from each of its
    parameters."""
    config: Any = getattr(module, "config", None)
    described = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else ""
    digest = hashlib.sha256(described.encode())
    for name, parameter in module.named_parameters():
        whole = parameter.detach()
        if type(parameter) is not nn.Parameter:  # torchao's, whose numbers are not stored as such
            whole = whole.dequantize()
        values = whole.flatten()
        chosen = values[:: max(1, len(values) // _VALUES)]
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(chosen.float().cpu().numpy().tobytes())
    return digest.hexdigest()
