"""The decoder of an encoder-decoder, called as a decoder-only model is.

Executors call it in place of the model, so that one way of running forward passes, eagerly and by
compiled programs, serves both kinds of models. What it reads besides its own tokens, the source, is
in the cache that it is given.

Legend: B rows, N query tokens, S slots, W hidden width of the encoder.
"""

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from outrider.runtime.hf.positions import RELATIVE, Positions, at_positions, with_positions


class HoldsSources(Protocol):
    """A cache of the decoder's own tokens with the sources beside it: ``Seq2SeqCache``, or what
    stands for it inside compiled programs.

    Attributes:
        both: the two caches as ``transformers`` takes them.
        states_BSW: the encoder's output where cross-attention is to compute its keys and values;
            else a tensor of width 0, since the model still asks for its shape.
        mask_B11S: which slots hold the row's source.
    """

    @property
    def both(self) -> EncoderDecoderCache: ...
    @property
    def states_BSW(self) -> Tensor: ...
    @property
    def mask_B11S(self) -> Tensor: ...


class Seq2SeqDecoder(nn.Module):
    """A decoder that takes positions per row, and reads sources from its cache.

    Args:
        module: the encoder-decoder; not changed.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__()
        decoder: Any = module.get_decoder()
        relative = module.config.model_type in RELATIVE
        self.whole = with_positions(module, decoder, relative=relative)
        self.training = module.training

    @property
    def config(self) -> PreTrainedConfig:
        """Of the encoder-decoder."""
        return self.whole.config

    def get_decoder(self) -> nn.Module:
        """The part with all decoder layers and the final norm."""
        decoder: nn.Module = self.whole.get_decoder()
        return decoder

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        past_key_values: HoldsSources,
        use_cache: bool,
        slot_positions: Tensor | None = None,
    ) -> Any:
        """What the encoder-decoder returns, its logits (B, N, V) among it.

        Args:
            input_ids: query tokens (B, N).
            position_ids: their positions (B, N).
            attention_mask: additive mask (B, 1, N, S).
            past_key_values: the cache, which is written to.
            use_cache: always true.
            slot_positions: position of the token in each slot (B, S), for relative positions.
        """
        sources = past_key_values
        with at_positions(Positions(position_ids, slot_positions)):
            return self.whole(
                encoder_outputs=BaseModelOutput(last_hidden_state=sources.states_BSW),
                attention_mask=sources.mask_B11S,
                decoder_input_ids=input_ids,
                decoder_attention_mask=attention_mask,
                past_key_values=sources.both,
                use_cache=use_cache,
            )

    def encoded(self, tokens_BS: Tensor, seen_BS: Tensor) -> Tensor:
        """The encoder's output for sources, (B, S, W).

        Args:
            tokens_BS: the sources.
            seen_BS: 1 where there is a token, 0 where there is padding.
        """
        encoder: Any = self.whole.get_encoder()
        states_BSW: Tensor = encoder(input_ids=tokens_BS, attention_mask=seen_BS).last_hidden_state
        return states_BSW
