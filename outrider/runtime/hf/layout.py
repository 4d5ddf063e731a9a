"""How the weights of one model are spread over several processes or devices.

A layout is given to ``load_model``. It adds arguments to ``from_pretrained`` and chooses the class
that runs the model. The sharding itself is done by ``transformers``, with the plan that each
model's configuration comes with, and by accelerate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel

from outrider.core.clock import Stopwatch
from outrider.core.errors import (
    IncompatibleError,
    RankError,
    UnsupportedModelError,
)
from outrider.core.values import shown
from outrider.runtime.hf.adapter import HFModel
from outrider.runtime.hf.sharded import ShardedModel


class Layout(Protocol):
    """How weights are spread."""

    def check_source(self, source: object, role: str, quantized: str | None) -> None:
        """Raises IncompatibleError for a source of weights that cannot be spread."""

    def adapter(self, config: PretrainedConfig, adapter: type[HFModel], name: str) -> type[HFModel]:
        """The class that runs the model.

        Args:
            config: the model's configuration.
            adapter: the class that runs the model where it is not spread.
            name: how messages call the model.

        Raises:
            UnsupportedModelError: a model that cannot be spread.
        """

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``from_pretrained``."""


@dataclass(frozen=True)
class TensorParallel:
    """Each layer is split among the processes of the default process group, by the model's own
    plan.

    Attributes:
        size: the number of processes.
    """

    size: int

    def check_source(self, source: object, role: str, quantized: str | None) -> None:
        """Raises IncompatibleError for a model in memory, and for weights of few bits."""
        if isinstance(source, HFModel) or hasattr(source, "forward"):
            raise IncompatibleError(
                f"{role} {shown(source)} is in memory and cannot be sharded: save it, and give its "
                f"folder"
            )
        if quantized is not None:
            raise IncompatibleError(
                f"{role} cannot be sharded and quantized ({quantized}): leave one out"
            )

    def adapter(self, config: PretrainedConfig, adapter: type[HFModel], name: str) -> type[HFModel]:
        """:class:`ShardedModel`, for a decoder that has a plan for so many processes."""
        kind = type(config).__name__
        if adapter is not HFModel:
            raise UnsupportedModelError(
                f"{name} ({kind}) cannot be sharded: only decoders with attention layers can; run "
                f"it on one process"
            )
        text = config.get_text_config()
        if not getattr(text, "base_model_tp_plan", None):
            raise UnsupportedModelError(
                f"{name} ({kind}) cannot be sharded: transformers has no tensor-parallel plan "
                f"(base_model_tp_plan) for it; run it on one process, or with a device map"
            )
        heads = getattr(text, "num_attention_heads", self.size)
        for what, number in (
            ("attention heads", heads),
            ("key-value heads", getattr(text, "num_key_value_heads", None) or heads),
        ):
            if number % self.size:
                raise RankError(
                    f"{name} has {number} {what}, which {self.size} processes cannot share "
                    f"equally: start a number of processes that divides {number}"
                )
        return ShardedModel

    def arguments(self) -> dict[str, Any]:
        """The predefined plan, as this release of ``transformers`` is asked for it."""
        from transformers.distributed import DistributedConfig

        if "tp_size" in {field.name for field in fields(DistributedConfig)}:
            return {"distributed_config": DistributedConfig(tp_size=self.size, tp_plan="auto")}
        return {"tp_plan": "auto"}


@dataclass(frozen=True)
class DeviceMap:
    """The weights that do not fit on the device stay in the host's memory or on disk, and are
    copied to the device for each forward pass, by accelerate (extra ``offload``).

    Attributes:
        placement: ``auto``, or a device by the path of each part of the model.
        max_memory: by device, such as ``{"cpu": "8GiB"}``, for ``auto``; None takes what is free.
        folder: where weights are kept that have to be written to disk again; None for none.
    """

    placement: str | Mapping[str, str | int] = "auto"
    max_memory: Mapping[str | int, str | int] | None = None
    folder: str | Path | None = None

    def check_source(self, source: object, role: str, quantized: str | None) -> None:
        """Raises IncompatibleError for a model in memory, and for weights of few bits."""
        if isinstance(source, HFModel) or hasattr(source, "forward"):
            raise IncompatibleError(
                f"{role} {shown(source)} is in memory already: give its folder to offload it"
            )
        if quantized is not None:
            raise IncompatibleError(
                f"{role} cannot be offloaded and quantized ({quantized}): leave one out"
            )

    def adapter(self, config: PretrainedConfig, adapter: type[HFModel], name: str) -> type[HFModel]:
        """:class:`OffloadedModel`, for a decoder with attention layers."""
        if adapter is not HFModel:
            raise UnsupportedModelError(
                f"{name} ({type(config).__name__}) cannot be offloaded: only decoders with "
                f"attention layers can"
            )
        return OffloadedModel

    def arguments(self) -> dict[str, Any]:
        """What ``from_pretrained`` takes."""
        placement = self.placement if isinstance(self.placement, str) else dict(self.placement)
        limits = None if self.max_memory is None else dict(self.max_memory)
        folder = None if self.folder is None else str(self.folder)
        return {"device_map": placement, "max_memory": limits, "offload_folder": folder}


class OffloadedModel(HFModel):
    """An :class:`HFModel` some of whose weights are elsewhere. All layers run on one device.

    Args:
        module: the model, with accelerate's ``hf_device_map``.
        tokenizer: its tokenizer.
        name: how messages call it.

    Raises:
        UnsupportedModelError: layers on several GPUs.
    """

    def __init__(self, module: PreTrainedModel, tokenizer: Any = None, name: str = "model") -> None:
        super().__init__(module, tokenizer, name)
        used = {str(each) for each in getattr(module, "hf_device_map", {}).values()}
        gpus = sorted(used - {"cpu", "disk"})
        if len(gpus) > 1:
            raise UnsupportedModelError(
                f"{name} has layers on {len(gpus)} devices ({', '.join(gpus)}), which exchange "
                f"nothing in parallel: shard it with torchrun (docs/cluster.md)"
            )
        index = gpus[0] if gpus else "cpu"
        self.device = torch.device(f"cuda:{index}" if index.isdecimal() else index)
        self.watch = Stopwatch(self.device)
