"""``/v1/responses``: OpenAI's newer interface, for text. Nothing is stored.

https://platform.openai.com/docs/api-reference/responses
"""

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from starlette.responses import Response

from outrider.sampling import Grammar
from outrider.serve.choice import token_fields
from outrider.serve.conversation import ChatMessage, Text
from outrider.serve.errors import json_response
from outrider.serve.events import EventStream, event
from outrider.serve.fields import Body, GenerationFields, Neutral
from outrider.serve.service import Asked, Service

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
        "parallel_tool_calls": (True, False),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_key": (),
        "prompt_cache_retention": (),
        "reasoning": ({},),
        "safety_identifier": (),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "n": (1,),
        "response_format": (),
    }

    input: Annotated[
        Annotated[list[InputMessage], Field(min_length=1)],
        BeforeValidator(_items),
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
        ),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    text: TextOptions | None = None

    @property
    def grammar(self) -> Grammar | None:
        chosen = None if self.text is None else self.text.format
        if chosen is None or chosen.type == "text":
            return super().grammar
        if chosen.schema_ is not None:
            return Grammar.json_schema(chosen.schema_)
        return Grammar.json_object()


@router.post("/v1/responses")
async def responses(body: ResponseRequest, http: Request) -> Response:
    """Answers a conversation."""
    service: Service = http.app.state.service
    service.check_model(body.model)
    messages = [each.message for each in body.input]
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    prompt = await service.encode_chat(messages, "input")
    asked = await service.ask(body, [prompt], body.max_output_tokens, None)
    http.state.asked = asked
    answer = _Answer(service, body, asked)
    if body.stream:
        return EventStream(asked.generation, answer.events())
    await service.collect(asked, http)
    return json_response(answer.document(answer.status))


class _Answer:
    """The response to a request."""

    def __init__(self, service: Service, body: ResponseRequest, asked: Asked) -> None:
        self._service = service
        self._body = body
        self._asked = asked
        (self._choice,) = asked.choices
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sequence = 0

    @property
    def status(self) -> str:
        """Of a finished answer: whether the model ended it."""
        return "completed" if self._choice.finish_reason == "stop" else "incomplete"

    def document(self, status: str) -> dict[str, object]:
        """The response as it stands."""
        body, over = self._body, status in ("completed", "incomplete")
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
            "output": [self._item(status)] if over else [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
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
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self.document("in_progress"))
        yield self._event("response.in_progress", response=self.document("in_progress"))
        item = self._item("in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **place, part=self._content(""))
        async with aclosing(self._service.parts(self._asked)) as parts:
            async for _, part in parts:
                if part.text:
                    yield self._event(
                        "response.output_text.delta", **place, delta=part.text, logprobs=[]
                    )
        text, status = self._choice.part.text, self.status
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=self._content(text))
        yield self._event("response.output_item.done", output_index=0, item=self._item(status))
        yield self._event(f"response.{status}", response=self.document(status))

    def _event(self, kind: str, **fields: object) -> str:
        document = {"type": kind, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return event(document, kind)

    def _item(self, status: str) -> dict[str, object]:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self._content(self._choice.part.text)],
        } | self._tokens()

    def _tokens(self) -> dict[str, object]:
        return token_fields(self._choice.part, self._body, self._service.names)

    @staticmethod
    def _content(text: str) -> dict[str, object]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _usage(self) -> dict[str, object]:
        counts = self._asked.usage
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
