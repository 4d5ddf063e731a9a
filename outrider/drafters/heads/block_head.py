"""The weights of a DFlash or DSpark head, which belong to one target."""

from outrider.core.errors import IncompatibleError
from outrider.drafters.heads.block_network import BlockConfig, BlockNetwork
from outrider.drafters.heads.head import NetworkHead, check_target
from outrider.runtime import HFModel


class BlockHead(NetworkHead[BlockNetwork]):
    """A ``Head`` of kind ``dflash`` or ``dspark``; arguments as of ``NetworkHead``."""

    @property
    def config(self) -> BlockConfig:
        return self.network.config

    @property
    def kind(self) -> str:
        return self.config.kind

    def check(self, target: HFModel) -> None:
        """Checks that the head belongs to a target of this shape.

        Raises:
            IncompatibleError: another hidden width, vocabulary or number of layers; names both.
        """
        check_target(self, target)
        width = target.module.get_input_embeddings().weight.shape[1]
        if width != self.config.layers.hidden_size:
            raise IncompatibleError(
                f"{self.name} reads embeddings of width {self.config.layers.hidden_size}, those of "
                f"{target.name} have {width}: the head was trained for another target"
            )
