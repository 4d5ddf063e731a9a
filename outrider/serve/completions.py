"""``/v1/completions``: continues prompts, strings or token ids.

https://platform.openai.com/docs/api-reference/completions
"""

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from starlette.responses import Response

from outrider.serve.choice import (
    Choice,
    Part,
    completion_logprobs,
    token_fields,
    wants_tokens,
)
from outrider.serve.documented import generation_responses
from outrider.serve.errors import ApiError, json_response
from outrider.serve.events import DONE, Chunks, EventStream
from outrider.serve.fields import GenerationFields, Neutral
from outrider.serve.service import Asked, Service

DEFAULT_TOKENS = 16
MAX_LOGPROBS = 20

router = APIRouter()


def _prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a request: one or several strings, or lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(
            "must be a string, a list of strings, or one or several lists of token ids"
        )
    if all(isinstance(each, str) for each in value):
        return value
    if all(type(each) is int for each in value):
        return [value]
    lists = [each for each in value if isinstance(each, list)]
    if len(lists) == len(value) and all(type(id_) is int for each in lists for id_ in each):
        return value
    raise ValueError(
        "strings and token ids in one list: send all prompts as strings, or all as lists of token "
        "ids, which are whole numbers"
    )


class CompletionRequest(GenerationFields):
    """The body of a request."""

    NEUTRAL: ClassVar[Neutral] = {
        **GenerationFields.NEUTRAL,
        "best_of": (1,),
        "suffix": ("",),
        "prediction": (),
    }

    prompt: Annotated[
        list[Any],
        BeforeValidator(_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "array", "items": {"type": "integer"}},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                ]
            }
        ),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _something_to_return(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: must be at least 1, or 0 with echo=true")
        return self


@router.post("/v1/completions", responses=generation_responses())
async def completions(body: CompletionRequest, http: Request) -> Response:
    """Continues each prompt."""
    service: Service = http.app.state.service
    service.check_model(body.model)
    special = body.add_special_tokens is not False
    prompts = [await service.encode(each, add_special_tokens=special) for each in body.prompt]
    echoes = await _echoes(service, body, prompts) if body.echo else None
    asked = await service.ask(body, prompts, _max_new_tokens(body), body.logprobs, prediction=None)
    answer = _Answer(service, body, asked, echoes)
    http.state.asked = asked
    if body.stream:
        return EventStream(asked.generation, answer.events())
    await service.collect(asked, http)
    return json_response(answer.document())


def _max_new_tokens(body: CompletionRequest) -> int:
    """At least one: an output that is only echoed still runs, and its token is dropped."""
    return max(DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens, 1)


class _Echo(Part):
    """A prompt as part of an output."""


async def _echoes(
    service: Service, body: CompletionRequest, prompts: list[tuple[int, ...]]
) -> list[_Echo]:
    """The prompts' texts, and their log-probabilities where the request wants any."""
    echoes = []
    tokenizer = service.engine.target.tokenizer
    for given, ids in zip(body.prompt, prompts, strict=True):
        if isinstance(given, str):
            text = given
        elif tokenizer is None:
            raise ApiError("echo: the model has no tokenizer", param="echo")
        else:
            text = str(tokenizer.decode(list(ids)))
        echo = _Echo(text, list(ids))
        if body.logprobs is not None:
            scored = await service.between_steps(
                partial(service.engine.prompt_logprobs, ids, body.logprobs)
            )
            echo.logprobs, echo.top = list(scored.logprobs), list(scored.top)
        echoes.append(echo)
    return echoes


class _Answer:
    """The response to a request."""

    def __init__(
        self, service: Service, body: CompletionRequest, asked: Asked, echoes: list[_Echo] | None
    ) -> None:
        self._service = service
        self._body = body
        self._asked = asked
        self._echoes = echoes
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        self._chunks = Chunks(self._head)
        self._offsets = [0] * len(asked.choices)

    def document(self) -> dict[str, object]:
        """The whole response."""
        choices = [
            self._choice(index, self._whole(index, choice), self._reason(choice))
            for index, choice in enumerate(self._asked.choices)
        ]
        document = self._head | {"choices": choices, "usage": self._usage()}
        if (metrics := self._asked.metrics) is not None:
            document["metrics"] = metrics
        return document

    async def events(self) -> AsyncIterator[str]:
        """The response as a stream: prompts that are echoed, then what each round adds."""
        for index in range(len(self._asked.choices)):
            if (echo := self._echo(index)) is not None:
                yield self._chunk(index, echo, None)
        async with aclosing(self._service.parts(self._asked)) as parts:
            async for index, part in parts:
                reason = self._reason(self._asked.choices[index])
                part = Part() if self._body.max_tokens == 0 else part
                if reason is not None or part.text or self._tells_tokens:
                    yield self._chunk(index, part, reason)
        options = self._body.stream_options
        if options is not None and options.include_usage:
            last: dict[str, object] = {"choices": [], "usage": self._usage()}
            if (metrics := self._asked.metrics) is not None:
                last["metrics"] = metrics
            yield self._chunks.event(last)
        yield DONE

    @property
    def _tells_tokens(self) -> bool:
        return self._body.logprobs is not None or wants_tokens(self._body)

    def _reason(self, choice: Choice) -> str | None:
        return "length" if self._body.max_tokens == 0 else choice.finish_reason

    def _usage(self) -> dict[str, object]:
        counts = self._asked.usage
        if self._body.max_tokens == 0:
            counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
        return counts

    def _echo(self, index: int) -> _Echo | None:
        if self._echoes is None:
            return None
        return self._echoes[index // self._body.num_choices]

    def _whole(self, index: int, choice: Choice) -> Part:
        """An output, after its prompt where that is echoed."""
        part = Part() if self._body.max_tokens == 0 else choice.part
        echo = self._echo(index)
        if echo is None:
            return part
        whole = _Echo()
        whole.add(echo)
        whole.add(part)
        return whole

    def _chunk(self, index: int, part: Part, reason: str | None) -> str:
        chunk: dict[str, object] = {"choices": [self._choice(index, part, reason)]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self._usage() if options.continuous_usage_stats else None
        return self._chunks.event(chunk)

    def _choice(self, index: int, part: Part, reason: str | None) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "text": part.text,
            "logprobs": self._logprobs(index, part),
            "finish_reason": reason,
        }
        return choice | token_fields(part, self._body, self._service.names)

    def _logprobs(self, index: int, part: Part) -> dict[str, object] | None:
        wanted, names = self._body.logprobs, self._service.names
        if wanted is None:
            return None
        offset = self._offsets[index]
        self._offsets[index] += sum(len(names.text(token)) for token in part.token_ids)
        begins = isinstance(part, _Echo)
        return completion_logprobs(part, wanted, offset, names, begins=begins)
