"""Builds requests from prompts and sampling parameters, checks them, and makes their rows.

Users pass sampling parameters and request numbers as one for all prompts, or a list.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from outrider.core.errors import IncompatibleError, InvalidParameterError, PromptError
from outrider.core.values import as_python, check_flag, is_whole, shown
from outrider.engine.admission import KVMemory
from outrider.engine.chat import encode_messages
from outrider.engine.detokenize import Detokenizer
from outrider.engine.grammar import GrammarProcessor, compile_grammar
from outrider.engine.prompts import Prompt, Prompts, ReadPrompt, read_prompt, read_prompts
from outrider.engine.request import Request, Row, request_numbers
from outrider.engine.special_stops import SpecialStops
from outrider.engine.speculation import (
    Speculated,
    Speculation,
    SpeculationReader,
    check_tokens,
    read_speculations,
)
from outrider.engine.stop import Ending
from outrider.methods import Method, Recipe
from outrider.runtime import HFModel
from outrider.sampling import Processor, Sampling
from outrider.sampling.params import DEFAULTS
from outrider.sampling.stateless import check_stateless
from outrider.verifiers import Commit


@dataclass(frozen=True)
class RequestBuilder:
    """Checks and encodes what an engine is asked for.

    Attributes:
        target: the model that continues the prompts.
        method: the method that is used.
        recipe: the method with its options settled.
        speculations: reads the requests' own settings of speculation.
        drafts: whether anything is drafted, so that processors must be stateless.
        eos_ids: end-of-sequence tokens of the model.
        obeyed: the values of the target's generation config that outputs obey, by name.
        memory: the bound of the KV buffers, which each request alone must respect; None sets none.
    """

    target: HFModel
    method: Method
    recipe: Recipe
    speculations: SpeculationReader
    drafts: bool = True
    eos_ids: frozenset[int] = frozenset()
    obeyed: Mapping[str, object] = field(default_factory=dict)
    memory: KVMemory | None = None

    def batch(
        self,
        prompts: Prompts,
        sampling: Sampling | Iterable[Sampling] | None = None,
        add_special_tokens: bool = True,
        numbers: int | Iterable[int] | None = None,
        speculation: Speculation | Iterable[Speculation | None] | None = None,
    ) -> tuple[list[Request], bool]:
        """The requests of a call, and whether it was given one prompt alone; arguments and errors
        as those of :meth:`Engine.generate`."""
        read, single = read_prompts(prompts)
        samplings = read_samplings(sampling, len(read))
        numbers = read_numbers(numbers, len(read))
        requests = self._requests(read, samplings, add_special_tokens, numbers)
        if speculation is not None:
            each = map(self.speculations.read, read_speculations(speculation, len(read)))
            requests = list(map(_speculated, requests, each))
        return requests, single

    def single(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        add_special_tokens: bool = True,
        number: int | None = None,
        *,
        with_logprobs: bool = False,
        speculation: Speculation | None = None,
    ) -> Request:
        """The request of one prompt; ``with_logprobs`` asks for log-probabilities where the
        sampling parameters do not."""
        sampling = read_sampling(sampling)
        if with_logprobs and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        numbers = read_numbers(number, 1)
        request = self._requests([read_prompt(prompt)], [sampling], add_special_tokens, numbers)[0]
        if speculation is None:
            return request
        return _speculated(request, self.speculations.read(read_speculations(speculation, 1)[0]))

    def guided(
        self,
        request: Request,
        num_speculative_tokens: int | None,
        prediction: str | Sequence[int] | None,
    ) -> Request:
        """The request with a draft length of its own and an expected output; arguments and errors
        as those of :meth:`Engine.request`."""
        most = check_tokens(num_speculative_tokens, self.speculations.num_speculative_tokens)
        if most is None:
            most = request.num_speculative_tokens
        expected: tuple[int, ...] = ()
        if isinstance(prediction, str):
            expected = self._encode_text(prediction, False)
        elif prediction is not None:
            expected = self.encode(read_prompt(prediction), False) if prediction else ()
        return replace(request, num_speculative_tokens=most, prediction=expected)

    def encode(self, prompt: ReadPrompt, add_special_tokens: bool = True) -> tuple[int, ...]:
        """A prompt's token ids; raises PromptError as :meth:`Engine.encode` says."""
        ids = prompt.ids
        if prompt.messages is not None:
            ids = encode_messages(self.target.tokenizer, prompt.messages, self.target.name)
        if ids is None:
            ids = self._encode_text(str(prompt.given), add_special_tokens)
        if not ids:
            raise PromptError("the prompt is empty: give it at least one token")
        if len(ids) > self.target.prompt_limit:
            what = f"the context {self.target.limit}, one of which the output needs"
            if self.target.decoder_prompt is not None:
                what = f"the encoder reads {self.target.prompt_limit}"
            raise PromptError(
                f"the prompt has {len(ids)} tokens, {what}: shorten the prompt by "
                f"{len(ids) - self.target.prompt_limit}"
            )
        bad = [token for token in ids if not 0 <= token < self.target.num_tokens]
        if bad:
            raise PromptError(
                f"token id {bad[0]} is out of range: the vocabulary is 0 to "
                f"{self.target.num_tokens - 1}"
            )
        return ids

    def row(self, request: Request) -> Row:
        """The row of a request that has not started."""
        tokenizer, first_ids = self.target.tokenizer, request.first_ids
        detokenizer = special = None
        if tokenizer is not None:
            detokenizer = Detokenizer(tokenizer, first_ids)
            if stops := request.sampling.stop_strings:
                special = SpecialStops.among(stops, tokenizer, first_ids)
        room = self._room(request.prompt_ids)
        return Row(request, Ending(request.sampling, self.eos_ids, room, detokenizer, special))

    def settled(self, sampling: Sampling) -> Sampling:
        """The parameters with those that are None filled in; see :class:`Sampling`."""
        try:
            return sampling.with_defaults(self._defaults)
        except InvalidParameterError as error:
            raise InvalidParameterError(
                f"the generation config of {self.target.name} has {error}; set it in Sampling, or "
                f"load the model with generation_config=False"
            ) from None

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        """The sampling parameters among the values that are obeyed."""
        return {name: value for name, value in self.obeyed.items() if name in DEFAULTS}

    @cached_property
    def _has_rules(self) -> bool:
        """Whether the generation config asks more of outputs than values of parameters."""
        return len(self.obeyed) > len(self._defaults)

    def _requests(
        self,
        prompts: Sequence[ReadPrompt],
        samplings: Sequence[Sampling],
        add_special_tokens: bool,
        numbers: Sequence[int] | None,
    ) -> list[Request]:
        """A request per prompt, with the caller's number or a derived one."""
        check_flag("add_special_tokens", add_special_tokens)
        samplings = [self.settled(each) for each in samplings]
        for each in samplings:
            self._check_sampling(each)
        encoded = [self.encode(prompt, add_special_tokens) for prompt in prompts]
        self._check_processors(samplings, encoded)
        if numbers is None:
            numbers = request_numbers(encoded)
        requests = [
            Request(
                prompt.given,
                ids,
                self._with_rules(sampling, ids),
                number,
                self.target.decoder_prompt,
                index,
                seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            )
            for index, (prompt, ids, sampling, number) in enumerate(
                zip(prompts, encoded, samplings, numbers, strict=True)
            )
        ]
        if self.memory is not None:
            for request in requests:
                self.memory.check(request)
        return requests

    def _with_rules(self, sampling: Sampling, ids: tuple[int, ...]) -> Sampling:
        """The parameters with the processors of the generation config and of the grammar."""
        if self._has_rules:
            sampling = self.target.with_demands(sampling, ids, self._room(ids))
        if sampling.grammar is None:
            return sampling
        target, first = self.target, len(self.target.decoder_prompt or ids)
        matcher = compile_grammar(
            sampling.grammar, target.tokenizer, target.num_tokens, self.eos_ids
        )
        processors: list[Processor] = [*sampling.processors, GrammarProcessor(matcher, first)]
        return replace(sampling, processors=processors)

    def _room(self, ids: tuple[int, ...]) -> int:
        """Tokens the context has room for after a prompt."""
        return self.target.limit - len(self.target.decoder_prompt or ids)

    def _encode_text(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """A string's token ids. A string that begins with the beginning-of-sequence token, as chat
        templates write it, does not get a second one."""
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise PromptError("the target has no tokenizer: give the prompt as token ids")
        ids = tuple(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        bos = tokenizer.bos_token
        twice = ids[:2] == (tokenizer.bos_token_id, tokenizer.bos_token_id)
        return ids[1:] if add_special_tokens and bos and text.startswith(bos) and twice else ids

    def _check_processors(
        self, samplings: Sequence[Sampling], encoded: Sequence[tuple[int, ...]]
    ) -> None:
        """Raises InvalidParameterError for a processor with a state that drafts, or other requests,
        would corrupt."""
        checked: dict[int, object] = {}
        owned: dict[int, object] = {}
        for sampling, ids in zip(samplings, encoded, strict=True):
            for number, processor in enumerate(sampling.processors):
                if sampling.in_order and id(processor) in owned:
                    raise InvalidParameterError(
                        f"processors[{number}] ({type(processor).__name__}) is used by several "
                        f"requests, with stateless=False: give each request a processor of its own"
                    )
                owned[id(processor)] = processor
                if sampling.stateless is None and self.drafts and id(processor) not in checked:
                    checked[id(processor)] = processor
                    first = self.target.decoder_prompt or ids
                    ends = self.eos_ids | sampling.stop_token_ids
                    width, device = self.target.num_tokens, self.target.device
                    check_stateless(processor, number, first, width, ends, device)

    def _check_sampling(self, sampling: Sampling) -> None:
        if self.recipe.greedy_only and not sampling.greedy:
            has_mode = "mode" in self.method.options
            other = "the method's option mode='mjsd'" if has_mode else "method='speculative'"
            raise IncompatibleError(
                f"method {self.method.name!r} is defined at temperature 0 only, not at "
                f"{sampling.temperature}: set temperature=0, or take {other}"
            )
        if sampling.in_order and isinstance(self.recipe.verifier, Commit):
            raise IncompatibleError(
                f"method {self.method.name!r} searches, which calls logits processors out of "
                f"order: take method='plain' for processors with stateless=False"
            )
        if sampling.stop_strings and self.target.tokenizer is None:
            raise InvalidParameterError("stop strings need a tokenizer: give stop token ids")
        named = {
            "logit_bias": sampling.logit_bias,
            "stop": sorted(sampling.stop_token_ids),
            "forced": sampling.forced.values(),
        }
        for name, tokens in named.items():
            bad = [token for token in tokens if not 0 <= token < self.target.num_tokens]
            if bad:
                raise InvalidParameterError(
                    f"{name}={bad[0]}: token id {bad[0]} is out of range; the vocabulary is 0 to "
                    f"{self.target.num_tokens - 1}"
                )


def _speculated(request: Request, own: Speculated) -> Request:
    return replace(request, num_speculative_tokens=own.num_speculative_tokens, rule=own.rule)


def read_samplings(sampling: object, num_prompts: int) -> list[Sampling]:
    """Sampling parameters per prompt, from one for all or one for each.

    Raises:
        InvalidParameterError: what is no :class:`Sampling`, or another number of them.
    """
    sampling = as_python(sampling)
    if sampling is None or isinstance(sampling, Sampling | str | Mapping):
        return [read_sampling(sampling)] * num_prompts
    if not isinstance(sampling, Iterable):
        raise _no_sampling(sampling)
    samplings = [read_sampling(each) for each in sampling]
    if len(samplings) != num_prompts:
        raise InvalidParameterError(
            f"{len(samplings)} sampling parameters for {num_prompts} prompts: give one for all, or "
            f"one for each"
        )
    return samplings


def read_sampling(sampling: object) -> Sampling:
    """One request's sampling parameters; None takes the defaults.

    Raises:
        InvalidParameterError: what is no :class:`Sampling`.
    """
    if sampling is None:
        return Sampling()
    if not isinstance(sampling, Sampling):
        raise _no_sampling(sampling)
    return sampling


def read_numbers(numbers: object, num_prompts: int) -> list[int] | None:
    """Request numbers, one per prompt, from the numbers or, for one prompt, the number alone; None
    where they are to be derived.

    Raises:
        InvalidParameterError: what is no number from 0 to 2⁶⁴ - 1, or another number of them.
    """
    numbers = as_python(numbers)
    if numbers is None:
        return None
    given = list(numbers) if isinstance(numbers, Iterable) else [numbers]
    listed: list[Any] = [as_python(number) for number in given]
    bad = [number for number in listed if not is_whole(number) or not 0 <= number < 2**64]
    if bad:
        raise InvalidParameterError(
            f"request_numbers={shown(bad[0])}: must be whole numbers from 0 to 2**64 - 1"
        )
    if len(listed) != num_prompts:
        raise InvalidParameterError(
            f"{len(listed)} request numbers for {num_prompts} prompts: give one for each"
        )
    return listed


def _no_sampling(value: object) -> InvalidParameterError:
    example = "temperature=0.8, max_new_tokens=64"
    if isinstance(value, Mapping) and value:
        example = ", ".join(f"{name}={each!r}" for name, each in value.items())
    return InvalidParameterError(
        f"sampling={shown(value)}: must be outrider.Sampling; write Sampling({example})"
    )
