"""A model's generation config as sampling parameters.

Models are published with settings that ``generate`` obeys by default, and that their output depends
on: Qwen penalises repetition, mBART begins with a language's token, BART ends with the
end-of-sequence token even when cut off, Marian never writes its padding token. There are two kinds.

*Defaults* are ``repetition_penalty``, ``temperature``, ``top_k``, ``top_p`` and ``min_p``: they
hold where a request leaves the parameter None. ``do_sample: false`` makes the default temperature
0, except in a generation config that ``transformers`` derived from the model's config
(``_from_model_config``), where nobody chose it.

*Rules* hold for all requests. Single forbidden tokens become a bias, forced tokens
``Sampling.forced``, and all other rules ``transformers``' own logits processors, in the order of
``generate``. Processors run for one position at a time, so such a model is slower.

To disable a field, set it to None in ``module.generation_config``; to disable all, load with
``generation_config=False``. Length and search (``max_length``, ``num_beams``) are up to the caller.
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
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from outrider.core.errors import UnsupportedModelError
from outrider.sampling import Sampling
from outrider.sampling.params import DEFAULTS

_REFUSED = ("guidance_scale", "watermarking_config", "forced_decoder_ids")
_REFUSED_SAMPLERS = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
_RULES = {  # with the value that disables each
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def check_demands(config: GenerationConfig | None, name: str) -> None:
    """Raises UnsupportedModelError for a setting that cannot be obeyed here."""
    unlike: dict[str, float | None] = dict.fromkeys(_REFUSED, 1.0)
    if getattr(config, "do_sample", None):
        unlike |= _REFUSED_SAMPLERS
    for field, off in unlike.items():
        value = getattr(config, field, None)
        if value is not None and value != off:
            raise UnsupportedModelError(
                f"{name} sets {field}={value!r} in its generation config, which is not supported "
                f"here: set module.generation_config.{field} = None, or load it with "
                f"generation_config=False"
            )


def defaults_of(config: GenerationConfig | None) -> dict[str, Any]:
    """Sampling parameters that a generation config sets, by name."""
    values = {name: getattr(config, name, None) for name in DEFAULTS}
    if getattr(config, "do_sample", None) is False:
        greedy = None if getattr(config, "_from_model_config", False) else 0.0
        values = {"temperature": greedy, "repetition_penalty": values["repetition_penalty"]}
    return {name: value for name, value in values.items() if value is not None}


def obeyed(config: GenerationConfig | None) -> dict[str, Any]:
    """The settings of a generation config that have an effect: defaults and rules, by name."""
    rules = {field: getattr(config, field, None) for field in _RULES}
    return defaults_of(config) | {
        field: value
        for field, value in rules.items()
        if value not in (None, [], (), {}, _RULES[field])
    }


def with_demands(
    sampling: Sampling,
    config: GenerationConfig,
    prompt: Sequence[int],
    num_first: int,
    room: int,
    device: torch.device,
) -> Sampling:
    """Sampling parameters with the model's rules added.

    Args:
        sampling: what the user asks for.
        config: the model's generation config.
        prompt: the request's prompt, or its source.
        num_first: tokens that the output continues: the prompt, or the decoder prompt.
        room: tokens the context has room for.
        device: where logits are.
    """
    eos = _ids(config.eos_token_id)
    words = [word for word in config.bad_words_ids or [] if word not in [[token] for token in eos]]
    banned = {*(config.suppress_tokens or []), *(word[0] for word in words if len(word) == 1)}
    forced = {}
    if config.forced_bos_token_id is not None and num_first == 1:
        forced[0] = int(config.forced_bos_token_id)
    if config.forced_eos_token_id is not None:
        forced[min(sampling.max_new_tokens, room) - 1] = min(_ids(config.forced_eos_token_id))
    words = [word for word in words if len(word) > 1]
    processors = tuple(_processors(config, eos, words, prompt, num_first, device))
    if not (banned or forced or processors):
        return sampling
    return replace(
        sampling,
        logit_bias={**sampling.logit_bias, **dict.fromkeys(banned, -float("inf"))},
        forced={**forced, **sampling.forced},
        processors=(*sampling.processors, *processors),
    )


def _processors(
    config: Any,
    eos: list[int],
    words: list[list[int]],
    prompt: Sequence[int],
    num_first: int,
    device: torch.device,
) -> Iterator[Any]:
    """``transformers``' processors for the settings, in the order of ``generate``."""
    device_name = str(device)
    ids_1S: Any = torch.tensor([list(prompt)], device=device)
    if config.sequence_bias is not None:
        yield SequenceBiasLogitsProcessor(config.sequence_bias)
    if config.encoder_repetition_penalty not in (None, 1.0):
        yield EncoderRepetitionPenaltyLogitsProcessor(config.encoder_repetition_penalty, ids_1S)
    if config.no_repeat_ngram_size:
        yield NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size)
    if config.encoder_no_repeat_ngram_size:
        yield EncoderNoRepeatNGramLogitsProcessor(config.encoder_no_repeat_ngram_size, ids_1S)
    if words:
        yield NoBadWordsLogitsProcessor(words, eos or None)
    if config.min_length and eos:
        yield MinLengthLogitsProcessor(config.min_length, eos, device=device_name)
    if config.min_new_tokens and eos:
        yield MinNewTokensLengthLogitsProcessor(
            num_first, config.min_new_tokens, eos, device=device_name
        )
    if config.exponential_decay_length_penalty is not None and eos:
        penalty = config.exponential_decay_length_penalty
        yield ExponentialDecayLengthPenalty(penalty, eos, num_first)
    if config.begin_suppress_tokens:
        forced = num_first == 1 and config.forced_bos_token_id is not None
        first = num_first + 1 if forced else num_first
        yield SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, first, device_name)


def _ids(value: int | Sequence[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
