"""How the weights of one model are spread over several processes or devices.

A layout is given to ``load_model``. It adds arguments to ``from_pretrained`` and chooses the class
that runs the model. The sharding itself is done by ``transformers``, with the plan that each
model's configuration comes with, and by accelerate.
"""

from dataclasses import dataclass, fields
from typing import Any, Protocol

from transformers import PretrainedConfig

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
