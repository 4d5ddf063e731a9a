"""A hash that tells models apart without reading all of their weights."""

import hashlib
import json
from typing import Any

from torch import nn

_VALUES = 4096  # of each parameter


def fingerprint(module: nn.Module) -> str:
    """A hash of a module's configuration, if it has one, and of values sampled from each of its
    parameters. It does not depend on where the model lies."""
    config: Any = getattr(module, "config", None)
    described = _without_paths(config.to_dict()) if hasattr(config, "to_dict") else {}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    for name, parameter in module.named_parameters():
        whole = parameter.detach()
        if type(parameter) is not nn.Parameter:  # torchao's, whose numbers are not stored as such
            whole = whole.dequantize()
        values = whole.flatten()
        chosen = values[:: max(1, len(values) // _VALUES)]
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(chosen.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration, and those in it, without the folders that they were read from."""
    return {
        name: _without_paths(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name != "_name_or_path"
    }
