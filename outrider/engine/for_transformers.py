"""Speculative decoding under ``transformers``' own ``generate``, by its ``custom_generate`` hook.

    model.generate(
        **inputs, custom_generate=outrider.generate_for_transformers, assistant_model=draft
    )

``generate`` reads its arguments and the generation config as ever, and builds the logits processors
and stopping criteria; then it calls this function in place of its own decoding loop. The processors
are obeyed as they are: what ``generate`` would show them, in the order in which it would call them.
Where they are no more than temperature, top-k, top-p, min-p and a repetition penalty, they become
:class:`Sampling` parameters, which costs less. Whatever cannot be obeyed is refused by name, before
anything is generated.

``generate`` hands neither ``assistant_model`` nor ``streamer`` to a hook, which would ignore them
without a word. So they are read where ``generate`` has them, in the frame that calls this function.
``draft_model`` and ``stream_to`` are the same for hooks that call it themselves.

Legend: B rows, T tokens of the prompts, padding included.
"""

import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from outrider.core.errors import InvalidParameterError, PromptError
from outrider.engine.engine import Engine
from outrider.methods import find_method
from outrider.runtime import HFModel
from outrider.runtime.hf.load import load_model
from outrider.sampling import Processor, Sampling

_KNOWN_INPUTS = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}
_ONE_ONLY = {"num_beams": 1, "guidance_scale": 1, "prompt_lookup_num_tokens": None}
_OF_ONE_ROW = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_OFF: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_PARAMETERS: dict[type, tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
"""Processors that are a sampling parameter, with their attribute, in the order in which
:class:`Sampling` applies them."""


def generate_for_transformers(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    draft_model: PreTrainedModel | HFModel | None = None,
    method: str | None = None,
    num_speculative_tokens: int | None = None,
    engine: Engine | None = None,
    stream_to: BaseStreamer | None = None,
    **inputs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """A decoding loop for ``model.generate(custom_generate=...)``.

    Args:
        model: the target, a decoder.
        input_ids: prompts, (B, T), padded on the left.
        logits_processor: those that ``generate`` has prepared.
        stopping_criteria: the same.
        generation_config: the call's.
        draft_model: the draft model, for methods that need one; also ``assistant_model``.
        method: a name from ``outrider methods``; ``speculative`` with a draft model, else
            ``prompt-lookup``.
        num_speculative_tokens: most tokens drafted per round.
        engine: an engine of this model, such as a compiled one, in place of the three above.
        stream_to: a ``transformers`` streamer for one prompt; gets each round's tokens. Also
            ``streamer``.
        inputs: the model's further inputs as ``generate`` has prepared them.

    Returns:
        As ``generate``: sequences (B, tokens), prompts included, padded on the right; or a
        ``GenerateDecoderOnlyOutput`` with them where ``return_dict_in_generate`` is set.

    Raises:
        InvalidParameterError: what cannot be obeyed here, by name; an engine of another model.
        PromptError: prompts padded on the right.
    """
    _check_supported(model, generation_config, stopping_criteria, inputs, len(input_ids))
    assistant_model, streamer = _given_to_generate(sys._getframe(1))
    draft_model = _one_of("assistant_model", assistant_model, "draft_model", draft_model)
    if engine is None:
        engine = _engine_for(model, draft_model, method, num_speculative_tokens)
    elif engine.target.module is not model:
        raise InvalidParameterError(
            "engine: was loaded for another model than the one whose generate is called; load it "
            "by outrider.load(model, ...)"
        )
    prompts, paddings = _unpadded(input_ids, inputs.get("attention_mask"))
    samplings = _samplings(
        paddings, input_ids, logits_processor, stopping_criteria, generation_config
    )
    to = _one_of("streamer", streamer, "stream_to", stream_to)
    if to is not None:
        outputs = [_streamed(engine, prompts, samplings, to, has_prompt=streamer is not None)]
    else:
        outputs = [result.token_ids for result in engine.generate(prompts, samplings)]
    sequences_BT = _padded(input_ids, outputs, generation_config)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences_BT)  # type: ignore[arg-type]
    return sequences_BT


def _given_to_generate(caller: FrameType) -> tuple[Any, Any]:
    """The ``assistant_model`` and the ``streamer`` of the ``generate`` that calls the hook; None
    where something else calls it."""
    if caller.f_code is not inspect.unwrap(GenerationMixin.generate).__code__:
        return None, None
    return caller.f_locals.get("assistant_model"), caller.f_locals.get("streamer")


def _one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The one that was given; None if none was.

    Raises:
        InvalidParameterError: both were.
    """
    if value is not None and other is not None:
        raise InvalidParameterError(f"{name} and {other_name}: are the same here; give one of them")
    return other if value is None else value


def _engine_for(
    model: PreTrainedModel,
    draft_model: PreTrainedModel | HFModel | None,
    method: str | None,
    num_speculative_tokens: int | None,
) -> Engine:
    """An engine that obeys the call's processors and end tokens, not the model's own config."""
    if method is None:
        method = "prompt-lookup" if draft_model is None else "speculative"
    draft = None if draft_model is None else load_model(draft_model, role="draft")
    return Engine(
        load_model(model, role="target"),
        draft,
        find_method(method),
        num_speculative_tokens=num_speculative_tokens,
        generation_config=False,
    )


def _check_supported(
    model: PreTrainedModel,
    config: GenerationConfig,
    criteria: StoppingCriteriaList,
    inputs: Mapping[str, Any],
    num_rows: int,
) -> None:
    """Raises InvalidParameterError for whatever could only be ignored."""
    if model.config.is_encoder_decoder:
        raise InvalidParameterError(
            f"{type(model).__name__} is an encoder-decoder, which this hook does not decode: use "
            f"outrider.load(model).generate(...)"
        )
    for name, one in _ONE_ONLY.items():
        value = getattr(config, name, one)
        if value not in (None, one):
            raise InvalidParameterError(
                f"{name}={value!r}: is not decoded by this hook; leave it out, or use generate "
                f"without custom_generate"
            )
    for name in _OF_ONE_ROW if num_rows > 1 else ():
        if getattr(config, name, None) not in (None, 0, 1.0):
            raise InvalidParameterError(
                f"{name}={getattr(config, name)!r}: is obeyed for one prompt at a time here, and "
                f"there are {num_rows}"
            )
    for name in _OUTPUTS:
        if getattr(config, name, False):
            raise InvalidParameterError(
                f"{name}=True: a speculative round does not keep them; leave it out (engine."
                f"generate reports log-probabilities: Sampling(logprobs=...))"
            )
    for criterion in criteria:
        if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria):
            raise InvalidParameterError(
                f"stopping criterion {type(criterion).__name__}: only max_length and "
                f"eos_token_id are obeyed here; leave it out, or use generate without "
                f"custom_generate"
            )
    unknown = sorted(name for name, value in inputs.items() if value is not None)
    unknown = [name for name in unknown if name not in _KNOWN_INPUTS]
    if unknown:
        raise InvalidParameterError(f"{unknown[0]}: this hook decodes token ids only; leave it out")
    cache = inputs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise InvalidParameterError(
            "past_key_values: holds tokens already, and this hook has KV caches of its own; leave "
            "it out"
        )


def _unpadded(input_ids: Tensor, mask_BT: Tensor | None) -> tuple[list[list[int]], list[int]]:
    """The prompts' own tokens, and how many tokens of padding precede each."""
    rows = input_ids.tolist()
    if mask_BT is None:
        return rows, [0] * len(rows)
    prompts, paddings = [], []
    for row, mask in zip(rows, mask_BT.tolist(), strict=True):
        padding = mask.index(1) if 1 in mask else len(mask)
        if 0 in mask[padding:]:
            raise PromptError(
                "attention_mask has zeros after a prompt's first token: pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        prompts.append(row[padding:])
        paddings.append(padding)
    return prompts, paddings


def _samplings(
    paddings: Sequence[int],
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> list[Sampling]:
    """Each row's sampling parameters; random numbers follow ``torch.manual_seed``."""
    longest = min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria))
    ends = [c.eos_token_id for c in criteria if isinstance(c, EosTokenCriteria)]
    end_ids = [int(token) for ids in ends for token in torch.as_tensor(ids).flatten().tolist()]
    shared: dict[str, Any] = {
        "max_new_tokens": longest - input_ids.shape[1],
        "stop": end_ids,
        "ignore_eos": True,
        "seed": int(torch.randint(2**62, ())) if config.do_sample else 0,
    }
    parameters = _as_parameters(processors, paddings)
    if parameters is not None:
        return [Sampling(**(shared | _settled(parameters, config)))] * len(paddings)
    return [
        Sampling(
            **(shared | _settled({}, config)),
            processors=tuple(_for_row(p, row, input_ids[row, :padding]) for p in processors),
        )
        for row, padding in enumerate(paddings)
    ]


def _settled(parameters: Mapping[str, float], config: GenerationConfig) -> dict[str, float]:
    """Every parameter with a default, so that none is taken from elsewhere."""
    return {**_OFF, **parameters} | ({} if config.do_sample else {"temperature": 0.0})


def _as_parameters(
    processors: LogitsProcessorList, paddings: Sequence[int]
) -> dict[str, float] | None:
    """The processors as sampling parameters; None where one is none, or comes in another order."""
    found: dict[str, float] = {}
    order = list(_PARAMETERS)
    kinds = [type(processor) for processor in processors]
    if kinds != [kind for kind in order if kind in kinds]:
        return None
    for processor, kind in zip(processors, kinds, strict=True):
        if not _is_parameter(processor, paddings):
            return None
        name, attribute = _PARAMETERS[kind]
        found[name] = getattr(processor, attribute)
    return found


def _is_parameter(processor: Any, paddings: Sequence[int]) -> bool:
    """Whether a processor does just what its sampling parameter does; a repetition penalty there
    counts all of the prompt and none of the padding."""
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, Tensor):
            return ignored.tolist() == list(paddings)
        return not ignored and not any(paddings)
    keeps_one = getattr(processor, "min_tokens_to_keep", 1) == 1
    return keeps_one and getattr(processor, "filter_value", -math.inf) == -math.inf


def _for_row(processor: Any, row: int, padding_P: Tensor) -> Processor:
    """A processor as ``generate`` calls it for one row: with the row's padding before its tokens,
    and, where it is told which row it is asked about, with that row's number."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        processor = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    elif isinstance(processor, RepetitionPenaltyLogitsProcessor):
        processor = _penalty_of_row(processor, row)
    padding_1P = padding_P[None]

    def process(ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
        scored: Tensor = processor(torch.cat([padding_1P, ids_1T], 1), scores_1V)
        return scored

    return process


def _penalty_of_row(processor: Any, row: int) -> Any:
    """A repetition penalty that leaves out the padding of this row alone."""
    ignored = processor.prompt_ignore_length
    if not isinstance(ignored, Tensor):
        return processor
    return RepetitionPenaltyLogitsProcessor(processor.penalty, ignored[row : row + 1])


def _streamed(
    engine: Engine,
    prompts: list[list[int]],
    samplings: list[Sampling],
    streamer: BaseStreamer,
    *,
    has_prompt: bool,
) -> tuple[int, ...]:
    """One prompt's tokens, handed to a streamer round by round. ``generate`` has put the prompt
    into a streamer that it was given itself."""
    if len(prompts) != 1:
        raise InvalidParameterError(f"streamer: takes one prompt, {len(prompts)} were given")
    tokens: list[int] = []
    if not has_prompt:
        streamer.put(torch.tensor(prompts))
    try:
        for event in engine.stream(prompts[0], samplings[0]):
            for token in event.token_ids:
                streamer.put(torch.tensor([token]))
            tokens += event.token_ids
    finally:
        streamer.end()
    return tuple(tokens)


def _padded(
    input_ids: Tensor, outputs: Sequence[Sequence[int]], config: GenerationConfig
) -> Tensor:
    """Prompts with their continuations, padded to the longest, (B, tokens)."""
    longest = max(map(len, outputs))
    pad = config.pad_token_id
    if pad is None and any(len(output) < longest for output in outputs):
        ends = config.eos_token_id
        pad = ends[0] if isinstance(ends, list) else ends
    rows = [[*output, *[pad] * (longest - len(output))] for output in outputs]
    return torch.cat([input_ids, torch.tensor(rows, device=input_ids.device)], 1)
