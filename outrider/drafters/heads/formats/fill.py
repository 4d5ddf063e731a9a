"""Copies the tensors of a checkpoint into a network."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from outrider.core.errors import ModelLoadError


@torch.no_grad()
def fill(
    network: nn.Module, tensors: Mapping[str, Tensor], name: str, skipped: Collection[str] = ()
) -> None:
    """Copies tensors into the parameters of the same names, in the network's precision.

    Args:
        network: the network; each of its parameters must have a tensor.
        tensors: the tensors.
        name: how messages call the head.
        skipped: tensors for which the network needs no parameter.

    Raises:
        ModelLoadError: a tensor is missing, unknown or of another shape; names it.
    """
    wanted = dict(network.named_parameters())
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise ModelLoadError(
            f"{name} has no tensor {missing[0]}, which its config.json asks for: the folder is "
            f"incomplete"
        )
    unknown = sorted(tensors.keys() - wanted.keys() - set(skipped))
    if unknown:
        raise ModelLoadError(
            f"{name} has a tensor {unknown[0]} that its config.json does not ask for: the files "
            f"belong to different heads"
        )
    for key, parameter in wanted.items():
        found = tensors[key]
        if found.shape != parameter.shape:
            raise ModelLoadError(
                f"{name}: tensor {key} has shape {tuple(found.shape)}, and config.json says "
                f"{tuple(parameter.shape)}: the files belong to different heads, or the head was "
                f"trained for another target"
            )
        parameter.copy_(found)
