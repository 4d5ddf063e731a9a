"""``/v1/chat/completions``: answers conversations, by the model's chat template.

https://platform.openai.com/docs/api-reference/chat
"""

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from outrider.serve.choice import Part, chat_logprobs, token_fields, wants_tokens
from outrider.serve.conversation import Messages, Text
from outrider.serve.documented import generation_responses
from outrider.serve.errors import ApiError, json_response
from outrider.serve.events import DONE, Chunks, EventStream
from outrider.serve.fields import Body, GenerationFields, Neutral
from outrider.serve.service import Asked, Service
from outrider.serve.tools.fields import Tool, ToolChoice, ToolUse, tool_use
from outrider.serve.tools.reply import Delta, Reply
from outrider.serve.tools.toolset import Toolset

MAX_LOGPROBS = 20

router = APIRouter()


class Prediction(Body):
    """The output that the client expects, most of it at least."""

    type: Literal["content"]
    content: Text


class ChatRequest(GenerationFields):
    """The body of a request."""

    NEUTRAL: ClassVar[Neutral] = {
        **GenerationFields.NEUTRAL,
        "add_generation_prompt": (True,),
        "audio": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "prompt_cache_key": (),
        "reasoning_effort": ("none",),
        "safety_identifier": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prediction: Prediction | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _top_logprobs_of_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only for logprobs=true")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> "ChatRequest":
        lengths = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(lengths) > 1:
            raise ValueError("max_tokens: leave it out beside max_completion_tokens")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def tool_use(self) -> ToolUse | None:
        """The functions that the answer may call; raises ApiError as :func:`tool_use`."""
        functions = [each.function for each in self.tools or ()]
        return tool_use(functions, self.tool_choice, self.parallel_tool_calls)


@router.post("/v1/chat/completions", responses=generation_responses())
async def chat_completions(body: ChatRequest, http: Request) -> Response:
    """Answers a conversation."""
    service: Service = http.app.state.service
    service.check_model(body.model)
    tools = service.toolset(body.tool_use)
    messages = [each.message for each in body.messages]
    prompt = await service.encode_chat(messages, "messages", tools)
    prediction = None
    if body.prediction is not None:
        prediction = body.prediction.content
        if service.engine.target.tokenizer is None:
            raise ApiError("prediction: the model has no tokenizer", param="prediction")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    asked = await service.ask(body, [prompt], body.max_new_tokens, logprobs, prediction, tools)
    http.state.asked = asked
    answer = _Answer(service, body, asked, tools)
    if body.stream:
        return EventStream(asked.generation, answer.events())
    await service.collect(asked, http)
    return json_response(answer.document())


class _Answer:
    """The response to a request."""

    def __init__(
        self, service: Service, body: ChatRequest, asked: Asked, tools: Toolset | None
    ) -> None:
        self._service = service
        self._body = body
        self._asked = asked
        self._replies = [Reply() if tools is None else tools.reply() for _ in asked.choices]
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        self._chunks = Chunks(self._head)

    def document(self) -> dict[str, object]:
        """The whole response."""
        choices = []
        for index, choice in enumerate(self._asked.choices):
            reply = self._replies[index]
            reply.take(choice.part.text, over=True)
            choices.append(
                {"index": index, "message": _message(reply), "finish_reason": self._reason(index)}
                | self._tokens(choice.part)
            )
        document: dict[str, object] = {**self._head, "choices": choices, "usage": self._asked.usage}
        if (metrics := self._asked.metrics) is not None:
            document["metrics"] = metrics
        return document

    async def events(self) -> AsyncIterator[str]:
        """The response as a stream: the role of each output, then what each round adds."""
        for index in range(len(self._asked.choices)):
            yield self._chunk(index, {"role": "assistant", "content": ""}, None)
        async with aclosing(self._service.parts(self._asked)) as parts:
            async for index, part in parts:
                over = self._asked.choices[index].finish_reason is not None
                deltas = self._replies[index].take(part.text, over=over)
                if not deltas and self._tells_tokens:
                    deltas = [""]
                for number, delta in enumerate(deltas):
                    told = part if number == 0 else Part()
                    yield self._chunk(index, _delta(delta), None, told)
                if over:
                    yield self._chunk(index, {}, self._reason(index))
        options = self._body.stream_options
        if options is not None and options.include_usage:
            last: dict[str, object] = {"choices": [], "usage": self._asked.usage}
            if (metrics := self._asked.metrics) is not None:
                last["metrics"] = metrics
            yield self._chunks.event(last)
        yield DONE

    def _reason(self, index: int) -> str | None:
        reason = self._asked.choices[index].finish_reason
        return "tool_calls" if reason == "stop" and self._replies[index].calls else reason

    @property
    def _tells_tokens(self) -> bool:
        return bool(self._body.logprobs) or wants_tokens(self._body)

    def _chunk(
        self, index: int, delta: dict[str, object], reason: str | None, part: Part | None = None
    ) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        if part is not None:
            choice |= self._tokens(part)
        chunk: dict[str, object] = {"choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self._asked.usage if options.continuous_usage_stats else None
        return self._chunks.event(chunk)

    def _tokens(self, part: Part) -> dict[str, object]:
        """What the request wants to know of single tokens."""
        body = self._body
        logprobs = chat_logprobs(part, self._service.names) if body.logprobs else None
        return {"logprobs": logprobs, **token_fields(part, body, self._service.names)}


def _message(reply: Reply) -> dict[str, object]:
    """A whole answer. One that only calls functions has no content."""
    calls = [
        {"id": each.id, "type": "function", "function": _function(each.name, each.arguments)}
        for each in reply.calls
    ]
    content = reply.text if reply.text.strip() or not calls else None
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    return message | {"tool_calls": calls} if calls else message


def _delta(delta: Delta) -> dict[str, object]:
    """What a chunk adds to an answer."""
    if isinstance(delta, str):
        return {"content": delta}
    call: dict[str, object] = {"index": delta.call.index}
    if delta.begins:
        call |= {"id": delta.call.id, "type": "function"}
        call["function"] = _function(delta.call.name, delta.arguments)
    else:
        call["function"] = {"arguments": delta.arguments}
    return {"tool_calls": [call]}


def _function(name: str, arguments: str) -> dict[str, str]:
    return {"name": name, "arguments": arguments}
