"""What an encoder-decoder's generation config demands of every text, as sampling parameters.

Such models are trained and published with rules that ``generate`` obeys unasked: mBART begins with
a language's token, BART ends with the end-of-sequence token even when cut off, Marian never writes
its padding token. Single forbidden tokens become a bias, forced ones ``Sampling.forced``, all else
``transformers``' own logits processors, in the order of ``generate``. Processors look at one place
at a time, so such a model is slower; set the field to None in ``module.generation_config`` to be
rid of a rule. Settings of sampling and beam search (temperature, ``num_beams``, ``max_length``) are
not rules of the text: they are the caller's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    GenerationConfig,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from outrider.core.errors import UnsupportedModelError
from outrider.sampling import Sampling

_REFUSED = ("guidance_scale", "watermarking_config", "forced_decoder_ids")


def check_demands(config: GenerationConfig, name: str) -> None:
    """Raises UnsupportedModelError for a rule that is no matter of one text's logits."""
    for field in _REFUSED:
        value = getattr(config, field, None)
        if value is not None and value != 1:
            raise UnsupportedModelError(
                f"{name} sets {field}={value!r} in its generation config, which is not supported "
                f"here: set module.generation_config.{field} = None"
            )


def with_demands(
    sampling: Sampling,
    config: GenerationConfig,
    source: Sequence[int],
    room: int,
    device: torch.device,
) -> Sampling:
    """The parameters with the model's demands added.

    Args:
        sampling: what the user asks for.
        config: the model's generation config.
        source: the request's source text.
        room: tokens the decoder's context has room for.
        device: where logits live.
    """
    eos = _ids(config.eos_token_id)
    words = [word for word in config.bad_words_ids or [] if word not in [[token] for token in eos]]
    banned = {*(config.suppress_tokens or []), *(word[0] for word in words if len(word) == 1)}
    forced = {}
    if config.forced_bos_token_id is not None:
        forced[0] = int(config.forced_bos_token_id)
    if config.forced_eos_token_id is not None:
        forced[min(sampling.max_new_tokens, room) - 1] = min(_ids(config.forced_eos_token_id))
    return replace(
        sampling,
        logit_bias={**sampling.logit_bias, **dict.fromkeys(banned, -float("inf"))},
        forced={**forced, **sampling.forced},
        processors=(
            *sampling.processors,
            *_processors(config, eos, [word for word in words if len(word) > 1], source, device),
        ),
    )


def _processors(
    config: Any, eos: list[int], words: list[list[int]], source: Sequence[int], device: torch.device
) -> Iterator[Any]:
    """``transformers``' processors for what is set, in the order of ``generate``."""
    place = str(device)
    ids_1S: Any = torch.tensor([list(source)], device=device)
    if config.sequence_bias is not None:
        yield SequenceBiasLogitsProcessor(config.sequence_bias)
    if config.encoder_repetition_penalty not in (None, 1.0):
        yield EncoderRepetitionPenaltyLogitsProcessor(config.encoder_repetition_penalty, ids_1S)
    if config.repetition_penalty not in (None, 1.0):
        yield RepetitionPenaltyLogitsProcessor(config.repetition_penalty)
    if config.no_repeat_ngram_size:
        yield NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size)
    if config.encoder_no_repeat_ngram_size:
        yield EncoderNoRepeatNGramLogitsProcessor(config.encoder_no_repeat_ngram_size, ids_1S)
    if words:
        yield NoBadWordsLogitsProcessor(words, eos or None)
    if config.min_length and eos:
        yield MinLengthLogitsProcessor(config.min_length, eos, device=place)
    if config.min_new_tokens and eos:
        yield MinNewTokensLengthLogitsProcessor(1, config.min_new_tokens, eos, device=place)
    if config.exponential_decay_length_penalty is not None and eos:
        yield ExponentialDecayLengthPenalty(config.exponential_decay_length_penalty, eos, 1)
    if config.begin_suppress_tokens:
        first = 1 if config.forced_bos_token_id is None else 2
        yield SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, first, place)


def _ids(value: int | Sequence[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
