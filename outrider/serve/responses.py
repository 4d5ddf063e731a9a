"""``/v1/responses``: OpenAI's newer interface, for text and calls of functions. Nothing is stored.

https://platform.openai.com/docs/api-reference/responses
"""

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator
from starlette.responses import Response

from outrider.sampling import Grammar
from outrider.serve.choice import token_fields
from outrider.serve.conversation import CalledFunction, ChatMessage, Text, ToolCall
from outrider.serve.documented import generation_responses
from outrider.serve.errors import json_response
from outrider.serve.events import EventStream, event
from outrider.serve.fields import Body, GenerationFields, Neutral
from outrider.serve.service import Asked, Service
from outrider.serve.tools.fields import FunctionFields, NamedTool, ToolChoice, tool_use
from outrider.serve.tools.reply import Call, Delta, Reply

router = APIRouter()


def _items(value: Any) -> Any:
    """The input as messages: a string is a message of the user's."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return value


class InputMessage(ChatMessage):
    """A message of the input."""

    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None


class FunctionCall(CalledFunction):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutput(Body):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text
    id: str | None = None
    status: str | None = None


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return kind if kind in ("function_call", "function_call_output") else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


class ResponseTool(FunctionFields):
    """A tool, whose function lies beside its type here."""

    type: Literal["function"]


class TextFormat(Body):
    """The format of the answer; a schema lies beside its type here."""

    NEUTRAL: ClassVar[Neutral] = {"strict": (True, False), "description": ()}

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema: for type 'json_schema', and needed there")
        return self


class TextOptions(Body):
    """Options of the answer's text."""

    NEUTRAL: ClassVar[Neutral] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ResponseRequest(GenerationFields):
    """The body of a request."""

    NEUTRAL: ClassVar[Neutral] = {
        **{name: v for name, v in GenerationFields.NEUTRAL.items() if name != "store"},
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_key": (),
        "prompt_cache_retention": (),
        "reasoning": ({},),
        "safety_identifier": (),
        "store": (False,),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "n": (1,),
        "response_format": (),
    }

    input: Annotated[
        Annotated[list[InputItem], Field(min_length=1)],
        BeforeValidator(_items),
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
        ),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation for the chat template."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if isinstance(item, FunctionCall):
                call = ToolCall(id=item.call_id, function=item).call
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            elif isinstance(item, FunctionCallOutput):
                result = {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
                messages.append(result)
            else:
                messages.append(item.message)
        return messages

    @property
    def grammar(self) -> Grammar | None:
        chosen = None if self.text is None else self.text.format
        if chosen is None or chosen.type == "text":
            return super().grammar
        if chosen.schema_ is not None:
            return Grammar.json_schema(chosen.schema_)
        return Grammar.json_object()


@router.post("/v1/responses", responses=generation_responses())
async def responses(body: ResponseRequest, http: Request) -> Response:
    """Answers a conversation."""
    service: Service = http.app.state.service
    service.check_model(body.model)
    use = tool_use(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    tools = service.toolset(use)
    prompt = await service.encode_chat(body.messages, "input", tools)
    asked = await service.ask(body, [prompt], body.max_output_tokens, None, tools=tools)
    http.state.asked = asked
    answer = _Answer(service, body, asked, Reply() if tools is None else tools.reply())
    if body.stream:
        return EventStream(asked.generation, answer.events())
    await service.collect(asked, http)
    return json_response(answer.whole())


@dataclass(eq=False)
class _Text:
    """A piece of an answer's text, between its calls: an item of the output."""

    text: str = ""
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")


class _Answer:
    """The response to a request: items of text and of calls, in the order of the answer."""

    def __init__(self, service: Service, body: ResponseRequest, asked: Asked, reply: Reply) -> None:
        self._service = service
        self._body = body
        self._asked = asked
        self._reply = reply
        (self._choice,) = asked.choices
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sequence = 0
        self._items: list[Call | _Text] = []

    @property
    def status(self) -> str:
        """Of a finished answer: whether the model ended it."""
        return "completed" if self._choice.finish_reason == "stop" else "incomplete"

    def whole(self) -> dict[str, object]:
        """The finished response."""
        for delta in self._reply.take(self._choice.part.text, over=True):
            self._take(delta)
        if not self._items:
            self._items.append(_Text())
        return self.document(self.status)

    def document(self, status: str) -> dict[str, object]:
        """The response as it stands."""
        body, over = self._body, status in ("completed", "incomplete")
        choice = body.tool_choice or ("auto" if body.tools else "none")
        if isinstance(choice, NamedTool):
            choice = {"type": "function", "name": choice.name}
        document: dict[str, object] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._service.model_name,
            "output": [self._item(each, status) for each in self._items] if over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": self._format()},
            "tool_choice": choice,
            "tools": [each.model_dump() for each in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if over else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
        metrics = self._asked.metrics if over else None
        return document if metrics is None else document | {"metrics": metrics}

    async def events(self) -> AsyncIterator[str]:
        """The response as a stream."""
        yield self._event("response.created", response=self.document("in_progress"))
        yield self._event("response.in_progress", response=self.document("in_progress"))
        async with aclosing(self._service.parts(self._asked)) as parts:
            async for _, part in parts:
                over = self._choice.finish_reason is not None
                for delta in self._reply.take(part.text, over=over):
                    for each in self._told(delta):
                        yield each
        if not self._items:
            self._items.append(_Text())
            for each in self._opened():
                yield each
        for each in self._closed():
            yield each
        yield self._event(f"response.{self.status}", response=self.document(self.status))

    def _begins(self, delta: Delta) -> bool:
        """Whether a delta begins an item."""
        last = self._items[-1] if self._items else None
        return not isinstance(last, _Text) if isinstance(delta, str) else last is not delta.call

    def _take(self, delta: Delta) -> None:
        """Adds new text, or a call; a call keeps its own arguments."""
        if self._begins(delta):
            self._items.append(_Text() if isinstance(delta, str) else delta.call)
        last = self._items[-1]
        if isinstance(delta, str) and isinstance(last, _Text):
            last.text += delta

    def _told(self, delta: Delta) -> Iterator[str]:
        """The events of new text, or of a call's new arguments."""
        begins = self._begins(delta)
        if begins:
            yield from self._closed()
        self._take(delta)
        if begins:
            yield from self._opened()
        place = self._place()
        if isinstance(delta, str):
            place["content_index"] = 0
            yield self._event("response.output_text.delta", **place, delta=delta, logprobs=[])
        elif delta.arguments:
            yield self._event(
                "response.function_call_arguments.delta", **place, delta=delta.arguments
            )

    def _opened(self) -> Iterator[str]:
        """The events that begin the last item."""
        owner, place = self._items[-1], self._place()
        is_text = isinstance(owner, _Text)
        empty: dict[str, object] = {"content": []} if is_text else {"arguments": ""}
        item = self._item(owner, "in_progress") | empty
        index = place["output_index"]
        yield self._event("response.output_item.added", output_index=index, item=item)
        if is_text:
            place["content_index"] = 0
            yield self._event("response.content_part.added", **place, part=_content(""))

    def _closed(self) -> Iterator[str]:
        """The events that end the last item, if there is one."""
        if not self._items:
            return
        owner, place = self._items[-1], self._place()
        status = "completed" if self._choice.finish_reason is None else self.status
        index, item = place["output_index"], self._item(owner, status)
        if isinstance(owner, _Text):
            place["content_index"], text = 0, owner.text
            yield self._event("response.output_text.done", **place, text=text, logprobs=[])
            yield self._event("response.content_part.done", **place, part=_content(text))
        else:
            told = {"name": owner.name, "arguments": owner.arguments}
            yield self._event("response.function_call_arguments.done", **place, **told)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _place(self) -> dict[str, object]:
        """The last item, for an event."""
        owner = self._items[-1]
        item_id = owner.id if isinstance(owner, _Text) else _item_id(owner)
        return {"item_id": item_id, "output_index": len(self._items) - 1}

    def _event(self, kind: str, **fields: object) -> str:
        document = {"type": kind, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return event(document, kind)

    def _item(self, owner: Call | _Text, status: str) -> dict[str, object]:
        if isinstance(owner, Call):
            return {
                "id": _item_id(owner),
                "type": "function_call",
                "status": status,
                "call_id": owner.id,
                "name": owner.name,
                "arguments": owner.arguments,
            }
        return {
            "id": owner.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_content(owner.text)],
        } | (self._tokens() if owner is self._items[0] else {})

    def _tokens(self) -> dict[str, object]:
        return token_fields(self._choice.part, self._body, self._service.names)

    def _format(self) -> dict[str, object]:
        chosen = None if self._body.text is None else self._body.text.format
        if chosen is None:
            return {"type": "text"}
        return chosen.model_dump(by_alias=True, exclude_none=True)

    def _usage(self) -> dict[str, object]:
        counts = self._asked.usage
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }


def _item_id(call: Call) -> str:
    return call.id.replace("call_", "fc_", 1)


def _content(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
