"""Host-to-device copies that do not wait for pending work on the device."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to the device asynchronously.

    A copy from pageable memory waits until the GPU has finished all queued work; a copy from pinned
    memory is queued behind that work instead.
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
