"""From the host to the device without waiting for what the device is doing."""

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's where the device is.

    A copy from ordinary memory first waits for everything that a GPU has been given to do; one from
    pinned memory takes its turn there.
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
