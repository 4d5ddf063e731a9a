"""What every kind of head is to the engine: weights that belong to one target.

A head is loaded like a draft model and given to the engine in its place. It cannot run by itself:
it reads the target's hidden states, and mostly uses the target's embeddings. A method builds its
drafter from the head and the target (``Parts.head``).
"""

import copy
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from outrider.core.errors import IncompatibleError
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.runtime import HFModel


@runtime_checkable
class Head(Protocol):
    """The weights of a head.

    Attributes:
        kind: the name of its kind, such as ``eagle3``.
        name: how messages call it.
        vocab_size: tokens of its target.
        hidden_size: width of its target's hidden states.
        target_layers: the layers of the target that it reads, numbered as in
            ``ForwardBatch.hidden_layers``.
        quantized: the kind of its weights of few bits where it drafts; None for those it has.
    """

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def target_layers(self) -> tuple[int, ...]: ...
    @property
    def quantized(self) -> str | None: ...
    def in_few_bits(self, kind: str) -> "Head":
        """The same head, which drafts with weights of few bits."""
        ...


class HeadShape(Protocol):
    """What the configuration of every head's network says.

    Attributes:
        target_hidden_size: width of the target's hidden states.
        target_layers: as of :class:`Head`.
    """

    @property
    def target_hidden_size(self) -> int: ...
    @property
    def target_layers(self) -> tuple[int, ...]: ...


class HeadNetwork(Protocol):
    """The network of a head; ``config`` is its shape."""

    @property
    def config(self) -> HeadShape: ...


N = TypeVar("N", bound=HeadNetwork)


class NetworkHead(Generic[N]):
    """A :class:`Head`, but for its kind: a network and the tokens that it drafts.

    Args:
        network: the weights.
        vocabulary: the tokens.
        name: how messages call it.

    Attributes:
        quantized: as of :class:`Head`.
    """

    quantized: str | None = None

    def __init__(self, network: N, vocabulary: DraftVocabulary, name: str = "head") -> None:
        self.network = network
        self.vocabulary = vocabulary
        self.name = name

    def in_few_bits(self, kind: str) -> Self:
        """The same weights, of which a drafter takes a copy in few bits.

        Args:
            kind: as of ``runtime/hf/quantize.py``.
        """
        other = copy.copy(self)
        other.quantized = kind
        return other

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.num_tokens

    @property
    def hidden_size(self) -> int:
        return self.network.config.target_hidden_size

    @property
    def target_layers(self) -> tuple[int, ...]:
        return self.network.config.target_layers


def check_target(head: Head, target: HFModel) -> None:
    """Checks that a head belongs to a target of this shape.

    Raises:
        IncompatibleError: another hidden width, vocabulary or number of layers (the message names
            both), or an encoder-decoder.
    """
    if target.decoder_prompt is not None:
        raise IncompatibleError(
            f"{head.name} reads the hidden states of a decoder-only model, and {target.name} is an "
            f"encoder-decoder: take a method with a draft model"
        )
    width = target.module.config.get_text_config().hidden_size
    if head.hidden_size != width:
        raise IncompatibleError(
            f"{head.name} reads hidden states of width {head.hidden_size}, those of {target.name} "
            f"have {width}: the head was trained for another target"
        )
    if head.vocab_size != target.num_tokens:
        raise IncompatibleError(
            f"{head.name} drafts for a vocabulary of {head.vocab_size} tokens, {target.name} has "
            f"{target.num_tokens}: the head was trained for another target"
        )
    if not all(1 <= layer <= target.num_layers for layer in head.target_layers):
        raise IncompatibleError(
            f"{head.name} reads layers {', '.join(map(str, head.target_layers))}, {target.name} "
            f"has layers 1 to {target.num_layers}: the head was trained for another target"
        )
