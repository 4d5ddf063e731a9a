"""From a request's fields to a generation that runs: shared by all kinds of generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from fastapi import Request as HttpRequest

from outrider.core.errors import PromptError
from outrider.engine import Engine, Request
from outrider.engine.prompts import Prompt
from outrider.engine.request import request_numbers
from outrider.engine.speculation import check_tokens
from outrider.engine.token_texts import TokenTexts
from outrider.serve.choice import Choice, Part, speculation_metrics, usage
from outrider.serve.engines import EnginePool
from outrider.serve.errors import ApiError, shut_down
from outrider.serve.fields import GenerationFields, SpeculationFields
from outrider.serve.generation import Generation
from outrider.serve.metrics import Metrics
from outrider.serve.names import TokenNames
from outrider.serve.rounds import can_record
from outrider.serve.settings import ServerSettings
from outrider.serve.tools.fields import ToolUse
from outrider.serve.tools.toolset import Toolset
from outrider.serve.worker import Worker

T = TypeVar("T")
_WHOLE_INTERVAL = 0.25
"""Seconds from one step to the next of an output that the client wants as a whole. They are for the
metrics alone."""


@dataclass(frozen=True)
class Asked:
    """What a request comes to.

    Attributes:
        prompts: the token ids of each prompt.
        generation: runs its outputs, several per prompt, in the order of the prompts.
        choices: the outputs so far.
        speculation_metrics: ``summary``, ``detailed`` or None.
        predicts: whether there is an expected output.
    """

    prompts: list[tuple[int, ...]]
    generation: Generation
    choices: list[Choice]
    speculation_metrics: str | None
    predicts: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def usage(self) -> dict[str, object]:
        """The token counts so far."""
        return usage(self.prompts, self.choices, predicts=self.predicts)

    @property
    def metrics(self) -> dict[str, object] | None:
        """What the response says of a single output's speculation; None if nothing."""
        if self.speculation_metrics is None or len(self.choices) != 1:
            return None
        detailed = self.speculation_metrics == "detailed"
        most = self.generation.engine.num_speculative_tokens
        return speculation_metrics(self.choices[0], most, detailed=detailed)


class Service:
    """The state of a server.

    Args:
        engine: the engine of requests that choose no method.
        settings: the operator's.

    Attributes:
        model_name: how clients call the model.
        names: tokens as text.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.model_name = settings.model_name or _without_folder(engine.target.name)
        self.worker = Worker()
        self.pool = EnginePool(engine, self.worker, settings.max_methods)
        self.names = TokenNames(engine.target.tokenizer)
        self.metrics = Metrics(self.model_name, self.pool, self.worker)
        self._generations: WeakSet[Generation] = WeakSet()

    @property
    def max_open(self) -> int:
        """Most outputs that run or wait."""
        return self.engine.max_batch_size + self.settings.max_queue

    @property
    def num_open(self) -> int:
        """Outputs that run or wait."""
        return sum(generation.num_open for generation in self._generations)

    async def encode(
        self, prompt: Prompt, param: str = "prompt", *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """A prompt's token ids, within the operator's limit.

        Args:
            prompt: a string, token ids, or messages.
            param: the field of the request that it comes from.
            add_special_tokens: as for :meth:`Engine.encode`.

        Raises:
            ApiError: what is no prompt, or one that is too long.
        """
        try:
            ids = await asyncio.to_thread(
                self.engine.encode, prompt, add_special_tokens=add_special_tokens
            )
        except PromptError as error:
            told = str(error).replace(self.engine.target.name, self.model_name)  # may be a path
            raise ApiError(told, param=param) from error
        most = self.settings.max_prompt_tokens
        if most is not None and len(ids) > most:
            raise ApiError(
                f"the prompt has {len(ids)} tokens, and this server reads at most {most}: shorten "
                f"the prompt by {len(ids) - most}",
                param=param,
            )
        return ids

    async def encode_chat(
        self, messages: list[dict[str, Any]], param: str, tools: Toolset | None = None
    ) -> tuple[int, ...]:
        """A conversation's token ids, within the operator's limit.

        Args:
            messages: the conversation.
            param: the field of the request that it comes from.
            tools: the functions that the answer may call.

        Raises:
            ApiError: what is no conversation, or one that is too long.
        """
        if tools is None:
            return await self.encode(messages, param)
        try:
            ids = await asyncio.to_thread(tools.encode, messages, self.model_name)
        except PromptError as error:
            raise ApiError(str(error), param=param) from error
        return await self.encode(ids, param)

    def toolset(self, use: ToolUse | None) -> Toolset | None:
        """The functions that an answer may call, for this model.

        Raises:
            ApiError: the model was not trained to call functions, or not in a known format.
        """
        if use is None:
            return None
        return Toolset.of(use, self.engine.target.tokenizer, self.model_name)

    async def between_steps(self, function: Callable[[], T]) -> T:
        """Calls a function that uses the models, or makes an engine, between two steps."""
        return await asyncio.wrap_future(self.worker.call(function))

    async def ask(
        self,
        fields: GenerationFields,
        prompts: list[tuple[int, ...]],
        max_new_tokens: int | None,
        logprobs: int | None,
        prediction: str | None = None,
        tools: Toolset | None = None,
    ) -> Asked:
        """Starts what a request asks for. Whoever gets it runs :meth:`parts` or closes it.

        Args:
            fields: the request's.
            prompts: its prompts' token ids.
            max_new_tokens: of each output; None as many as the context has room for.
            logprobs: as in ``Sampling``.
            prediction: the expected output.
            tools: the functions that the answer may call.

        Raises:
            ApiError: the server is full, or the request is wrong.
            OutriderError: the engine refuses the request.
        """
        engine = await self._engine(fields, prediction is not None)
        if fields.return_rounds and not can_record(engine):
            raise ApiError(
                "return_rounds: the engine's rounds are observed by something else, such as an "
                "adaptation: leave it out",
                param="return_rounds",
            )
        gamma = self._gamma(fields.num_speculative_tokens, engine)
        num = len(prompts) * fields.num_choices
        self._check_room(num, "n" if fields.num_choices > 1 else "prompt")
        grammar = fields.grammar if tools is None else tools.grammar(fields.grammar)
        sequences = [ids for ids in prompts for _ in range(fields.num_choices)]
        numbers = request_numbers(sequences)

        def build() -> list[Request]:
            return [
                engine.request(
                    ids,
                    fields.sampling(max_new_tokens or engine.limit - len(ids), logprobs, grammar),
                    request_number=number,
                    num_speculative_tokens=gamma,
                    prediction=prediction,
                )
                for ids, number in zip(sequences, numbers, strict=True)
            ]

        requests = await asyncio.to_thread(build)
        self._check_room(num, "n")
        generation = Generation(
            self.worker,
            engine,
            requests,
            self.settings.request_timeout,
            interval=self.settings.stream_interval if fields.stream else _WHOLE_INTERVAL,
            wants_rounds=bool(fields.return_rounds),
        )
        self._generations.add(generation)
        generation.start()
        return Asked(
            prompts,
            generation,
            [self._choice(request, fields) for request in requests],
            fields.speculation_metrics or self.settings.speculation_metrics,
            prediction is not None,
        )

    def _choice(self, request: Request, fields: SpeculationFields) -> Choice:
        tokenizer = self.engine.target.tokenizer
        if not fields.return_pieces or tokenizer is None:
            return Choice()
        return Choice(texts=TokenTexts(tokenizer, request.first_ids))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError with status 404 for another model than the one that is loaded."""
        if name is not None and name != self.model_name:
            raise ApiError(
                f"model {name[:200]!r} does not exist: this server has {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def parts(self, asked: Asked) -> AsyncGenerator[tuple[int, Part], None]:
        """What the rounds add to which output: one round, or all that have arrived while the last
        part was on its way. Closing the iterator aborts what is not over."""
        with asked.generation as generation:
            async for steps in generation:
                parts: dict[int, Part] = {}
                for step in steps:
                    self.metrics.observe(generation, step)
                    part = asked.choices[step.output].take(step)
                    if step.output in parts:
                        parts[step.output].add(part)
                    else:
                        parts[step.output] = part
                for index, part in parts.items():
                    yield index, part

    async def collect(self, asked: Asked, http: HttpRequest) -> list[Choice]:
        """Runs a generation to its end; ends it early if the client leaves.

        Raises:
            ApiError: the client has left, or the request took too long.
            OutriderError: the engine could not finish an output.
        """
        watch = asyncio.create_task(_watch(http, asked.generation))
        try:
            async with aclosing(self.parts(asked)) as parts:
                async for _ in parts:
                    pass
        except asyncio.CancelledError:
            raise shut_down() from None
        finally:
            watch.cancel()
        if asked.generation.disconnected:
            raise ApiError("the client has left", status=499, code="client_disconnected")
        return asked.choices

    async def _engine(self, fields: SpeculationFields, predicts: bool) -> Engine:
        chosen = (fields.method, fields.method_options, fields.divergence_budget)
        if not predicts and chosen == (None, None, None):
            return self.engine
        return await self.between_steps(lambda: self.pool.find(fields, predicts=predicts))

    def _gamma(self, wanted: int | None, engine: Engine) -> int | None:
        """A request's γ, at most the server's or the method's own, whichever is more; None if the
        request has none. A method whose own γ is less drafts no more than that.

        Raises:
            InvalidParameterError: a γ outside this range.
        """
        own = engine.num_speculative_tokens
        wanted = check_tokens(wanted, max(own, self.engine.num_speculative_tokens))
        return None if wanted is None else min(wanted, own)

    def _check_room(self, num: int, param: str) -> None:
        if num > self.max_open:
            raise ApiError(
                f"{num} outputs, and this server runs and queues at most {self.max_open}: lower n, "
                f"or send fewer prompts at once",
                param=param,
            )
        num_open = self.num_open
        if num_open + num > self.max_open:
            raise ApiError(
                f"{num_open} outputs run or wait, and no more than {self.max_open} may: try again",
                status=429,
                code="queue_full",
                headers={"Retry-After": "1"},
            )


def _without_folder(name: str) -> str:
    """A target's name; of a folder its last part, since clients need not know where it lies."""
    bare = name.removeprefix("target ")  # the role of a model that load() has read
    folder = Path(bare).expanduser()
    return folder.resolve().name if folder.is_dir() else bare


async def _watch(http: HttpRequest, generation: Generation) -> None:
    """Ends a generation when the client leaves."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    generation.disconnect()
