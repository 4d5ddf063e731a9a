"""The weights of a DFlash or DSpark head, which belong to one target."""

from outrider.core.errors import IncompatibleError
from outrider.drafters.heads.block_network import BlockConfig, BlockNetwork
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.head import check_target
from outrider.runtime import HFModel


class BlockHead:
    """A ``Head`` of kind ``dflash`` or ``dspark``.

    Args:
        network: the weights.
        vocabulary: the tokens that it drafts.
        name: how messages call it.
    """

    def __init__(
        self, network: BlockNetwork, vocabulary: DraftVocabulary, name: str = "head"
    ) -> None:
        self.network = network
        self.vocabulary = vocabulary
        self.name = name

    @property
    def config(self) -> BlockConfig:
        return self.network.config

    @property
    def kind(self) -> str:
        return self.config.kind

    @property
    def vocab_size(self) -> int:
        return self.config.num_tokens

    @property
    def hidden_size(self) -> int:
        return self.config.target_hidden_size

    @property
    def target_layers(self) -> tuple[int, ...]:
        return self.config.target_layers

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
