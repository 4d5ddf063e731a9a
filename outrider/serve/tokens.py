"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM has them."""

from typing import Annotated, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from outrider.serve.conversation import Messages
from outrider.serve.documented import body_errors, errors
from outrider.serve.errors import ApiError, json_response
from outrider.serve.fields import Body, Neutral
from outrider.serve.service import Service
from outrider.serve.tools.fields import Tool, tool_use

router = APIRouter()


class TokenizeRequest(Body):
    """A prompt or a conversation."""

    NEUTRAL: ClassVar[Neutral] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        if self.tools and self.messages is None:
            raise ValueError("tools: only for messages")
        return self


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


@router.post("/tokenize", responses=body_errors())
async def tokenize(body: TokenizeRequest, http: Request) -> Response:
    """The token ids of a prompt or a conversation."""
    service: Service = http.app.state.service
    service.check_model(body.model)
    tokenizer = _tokenizer(service)
    if body.messages is not None:
        messages = [each.message for each in body.messages]
        functions = [each.function for each in body.tools or ()]
        tools = service.toolset(tool_use(functions, None, None))
        ids = list(await service.encode_chat(messages, "messages", tools))
    else:
        special = body.add_special_tokens is not False
        ids = tokenizer(body.prompt, add_special_tokens=special)["input_ids"]
    strings = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return json_response(
        {
            "count": len(ids),
            "max_model_len": service.engine.limit,
            "tokens": ids,
            "token_strs": strings,
        }
    )


@router.post("/detokenize", responses=body_errors())
async def detokenize(body: DetokenizeRequest, http: Request) -> Response:
    """The text of token ids."""
    service: Service = http.app.state.service
    service.check_model(body.model)
    most = service.engine.target.num_tokens
    bad = [token for token in body.tokens if token >= most]
    if bad:
        raise ApiError(
            f"tokens: token id {bad[0]} is out of range: the vocabulary is 0 to {most - 1}",
            param="tokens",
        )
    return json_response({"prompt": _tokenizer(service).decode(body.tokens)})


@router.get("/tokenizer_info", responses=errors(400))
async def tokenizer_info(http: Request) -> Response:
    """What clients ask of a tokenizer."""
    service: Service = http.app.state.service
    tokenizer = _tokenizer(service)
    info = {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": service.engine.target.num_tokens,
        "model_max_length": service.engine.limit,
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        info[name] = getattr(tokenizer, name)
        info[f"{name}_id"] = getattr(tokenizer, f"{name}_id")
    return json_response(info)


def _tokenizer(service: Service) -> PreTrainedTokenizerBase:
    tokenizer = service.engine.target.tokenizer
    if tokenizer is None:
        raise ApiError("the model has no tokenizer: send token ids", code="no_tokenizer")
    return tokenizer
