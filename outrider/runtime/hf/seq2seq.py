"""Any T5-like, BART-like or Marian encoder-decoder as a target or a draft, unmodified.

The context holds the decoder's tokens; the cache holds the source. A batch's sources are encoded
once, when its rows are admitted, and turned into each layer's cross-attention keys and values,
which stay: by one compiled program, or by the encoder and the decoder's first forward pass. From
there on ``HFModel`` scores, commits and rolls back an encoder-decoder as any other model, except
that its decoder is told positions by other means (``positions.py``).

Legend: B rows, N query tokens, S slots, W hidden width of the encoder, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.core.context import Context
from outrider.core.errors import IncompatibleError, UnsupportedModelError
from outrider.runtime.executors.eager import EagerExecutor
from outrider.runtime.hf.adapter import MARGIN, HFModel, layout_of
from outrider.runtime.hf.positions import ABSOLUTE, RELATIVE
from outrider.runtime.hf.seq2seq_decoder import Seq2SeqDecoder
from outrider.runtime.hf.support import check_attention, check_head
from outrider.runtime.kv_cache.cross_attention import Seq2SeqCache
from outrider.runtime.kv_cache.storage import KVLayout
from outrider.runtime.prefill import unsampled_context
from outrider.runtime.runner import compiled_executor

_NO_POSITIONS = (
    "whose decoder cannot be given positions per row, which ragged batches and trees need"
)
_CAPACITY = (
    "whose experts drop tokens beyond a capacity that is counted per forward pass, so that logits "
    "depend on how many tokens share it"
)
_REASONS = {
    "led": "whose decoder takes no positions, and no mask either for a single token, which ragged "
    "batches need",
    "m2m_100": "whose decoder numbers tokens itself, leaving out padding, and cannot be given "
    "positions per row, which ragged batches and trees need",
    "nllb-moe": _CAPACITY,
    "switch_transformers": _CAPACITY,
    "umt5": "each of whose layers computes a position bias for the whole batch from one length, "
    "while rows of a ragged batch differ",
}
"""Why a family is not supported, where we know."""


class Seq2SeqModel(HFModel):
    """A ``core.Model`` around a ``transformers`` encoder-decoder.

    Its contexts have ``sources``, and begin with ``decoder_prompt``.

    Args:
        module: the model; put into evaluation mode.
        tokenizer: its tokenizer, or None for token ids only.
        name: how messages call it.

    Raises:
        UnsupportedModelError: no encoder-decoder, a family whose positions cannot be given per
            row, two vocabularies, or no token to begin with.
    """

    _layouts: tuple[KVLayout | None, KVLayout | None] | None = None
    """Of the decoder's own KV buffers and of those of cross-attention; None until an encoder by a
    program needs them."""

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "model",
    ) -> None:
        super().__init__(module, tokenizer, name)
        config: Any = module.config
        relative = config.model_type in RELATIVE
        self.num_layers = config.num_decoder_layers if relative else config.decoder_layers
        self.spec = replace(self.spec, tells_slots=relative, reads_sources=True)
        self._decoder = Seq2SeqDecoder(module)
        self.eager = EagerExecutor(self._decoder, self.spec, self.num_layers, name)
        self.decoder_prompt: tuple[int, ...] = (_start_token(module, name),)

    @property
    def prompt_limit(self) -> int:
        """Longest source in tokens: as many as the decoder has positions."""
        return self.limit

    def logits_after(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        with self.arithmetic():
            logits_1TV: Tensor = self.module(
                input_ids=torch.tensor([list(prompt)], device=self.device),
                decoder_input_ids=torch.tensor(
                    [[*self.decoder_prompt, *output]], device=self.device
                ),
                use_cache=False,
            ).logits
        return logits_1TV[0, -1]

    def _check(self, module: PreTrainedModel, name: str) -> None:
        check_seq2seq_config(module.config, type(module).__name__, name)
        check_head(module, name)
        check_attention(module.config, type(module).__name__, name)

    def short_cache(self, context: Context, num_tokens: int) -> None:
        """None: the decoder reads the source besides."""

    def further_forwards(self) -> Sequence[tuple[str, Callable[[], None]]]:
        return (("encoder", self._run_encoder),)

    @torch.inference_mode()
    def _run_encoder(self) -> None:
        self._cache(unsampled_context(self, [0, 0, 0]))

    def _cache(self, context: Context) -> Seq2SeqCache:
        """A cache with the encoded sources of a batch."""
        assert context.sources is not None, "an encoder-decoder's context has sources"
        length = max(map(len, context.sources))
        ids_BS = torch.zeros(context.num_rows, length, dtype=torch.int64)
        seen_BS = torch.zeros_like(ids_BS)
        for b, source in enumerate(context.sources):
            ids_BS[b, : len(source)] = torch.tensor(source)
            seen_BS[b, : len(source)] = 1
        ids_BS, seen_BS = ids_BS.to(self.device), seen_BS.to(self.device)
        limit = self.limit + MARGIN
        cache = Seq2SeqCache(context, self.num_layers, limit, self.dtype, self.plan)
        if not self._encode_by_program(cache, ids_BS):
            with self.watch, self.arithmetic():
                cache.states_BSW = self._decoder.encoded(ids_BS, seen_BS)
            self.without_compiled().extend(cache, context.tokens_BT[:, :1], num_logits=1)
        cache.drop_encoder_output()
        return cache

    def _encode_by_program(self, cache: Seq2SeqCache, ids_BS: Tensor) -> bool:
        """Encodes sources by the compiled program; returns whether there is one."""
        compiled = compiled_executor(self, cache, ids_BS.shape[1])
        if compiled is None:
            return False
        if self._layouts is None:
            example = self.example_cache()
            assert isinstance(example, Seq2SeqCache)
            self._layouts = layout_of(example), layout_of(example.cross)
        own, cross = self._layouts
        if own is None or cross is None:
            return False
        cache.reserve_all(own, cross)
        with self.watch:
            return compiled.read_sources(cache, ids_BS)


def check_kinds(target: HFModel, draft: HFModel) -> None:
    """Raises IncompatibleError unless both models have an encoder, or neither."""
    if (target.decoder_prompt is None) == (draft.decoder_prompt is None):
        return
    kinds = ("an encoder-decoder", "decoder-only")
    ours, theirs = kinds if draft.decoder_prompt is None else kinds[::-1]
    raise IncompatibleError(
        f"the target is {ours}, the draft {theirs}: they do not read the same text; take a draft "
        f"that is {ours}, or a method without a draft model"
    )


def check_seq2seq_config(config: PretrainedConfig, kind: str, name: str) -> None:
    """Raises UnsupportedModelError unless the model is of a supported family."""
    if not config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} ({kind}) is no encoder-decoder: use load_model")
    known = RELATIVE | ABSOLUTE
    if config.model_type not in known:
        raise UnsupportedModelError(
            f"{name} ({kind}) is an encoder-decoder of type {config.model_type}, "
            f"{_REASONS.get(config.model_type, _NO_POSITIONS)}; supported: "
            f"{', '.join(sorted(known))}"
        )
    decoder_vocab = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    if decoder_vocab != config.vocab_size:
        raise UnsupportedModelError(
            f"{name} ({kind}) has separate vocabularies for source ({config.vocab_size}) and text "
            f"({decoder_vocab}); take a model that shares one"
        )


def _start_token(module: PreTrainedModel, name: str) -> int:
    """The token that ``generate`` begins with."""
    for config in (getattr(module, "generation_config", None), module.config):
        for field in ("decoder_start_token_id", "bos_token_id"):
            token = getattr(config, field, None)
            if isinstance(token, int):
                return token
    raise UnsupportedModelError(
        f"{name} ({type(module).__name__}) has no decoder_start_token_id: set it in its config"
    )
