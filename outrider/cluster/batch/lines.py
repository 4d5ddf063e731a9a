"""What a line asks for, and the line of output that answers it.

A line is a JSON object of one of these forms:

    {"prompt": "...", ...}         a text to continue; with ``Asking.chat`` the user's message
    {"messages": [...], ...}       a conversation to answer
    {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
                                   a request in the format of OpenAI's batches

Lines of the first two forms take all settings from ``Asking``. Their other fields are copied to
the output, so that a data set keeps its names and labels; the answer becomes the field ``answer``,
or the last message of the conversation, which is how ``outrider distill`` reads ground truth. What
an earlier run has written into the line, an answer or an error, is left out.

A line of the third form takes its settings from its body, with the server's names and defaults
(``serve/fields.py``); only the seed, where the body has none, comes from ``Asking``. Its answer is
in the format of OpenAI's batches, too. It contains no time and no random id, so that two runs write
the same bytes.

https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from outrider.core.errors import OutriderError
from outrider.engine import Engine, Request, Result
from outrider.engine.chat import Message, check_messages
from outrider.sampling import Sampling

if TYPE_CHECKING:
    from pydantic import ValidationError

    from outrider.serve.fields import GenerationFields

Record = dict[str, Any]

_FORMS = '{"prompt": "..."}, {"messages": [...]} or {"custom_id": "...", "body": {...}}'
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_OUTCOME = frozenset(("error", "finish_reason", "num_tokens"))
"""Fields of the output that say how a line ended."""
_SETTINGS = frozenset(
    "temperature top_p top_k min_p max_tokens max_completion_tokens max_new_tokens stop "
    "stop_token_ids seed n logprobs top_logprobs logit_bias repetition_penalty presence_penalty "
    "frequency_penalty response_format structured_outputs ignore_eos tools".split()
)
"""Fields that would be a request's settings in a body: a line without a body may not have them, as
nothing would obey them."""


class LineError(OutriderError, ValueError):
    """A line is malformed, or asks for what a batch cannot do."""


@dataclass(frozen=True)
class Asking:
    """How all lines without a body are answered.

    Attributes:
        sampling: the sampling parameters. Seed and line number are the key of the random numbers.
        chat: take a ``prompt`` as the user's message, and answer it by the chat template.
        system: the system message of such a conversation.
        model_name: how bodies call the model; a worker takes the target's name for None.
    """

    sampling: Sampling
    chat: bool = False
    system: str | None = None
    model_name: str | None = None


class Line(Protocol):
    """A line that was understood."""

    def request(self, engine: Engine, number: int) -> Request:
        """What the engine is to do for the line of this number.

        Raises:
            OutriderError: the engine cannot do it.
        """

    def answered(self, result: Result, number: int) -> Record:
        """The line of output."""

    def failed(self, message: str, number: int) -> Record:
        """The line of output where the engine raised an error."""


def read_line(line: bytes, asking: Asking) -> Line:
    """What a line asks for.

    Raises:
        LineError: the line is malformed.
    """
    record = _object(line)
    if "body" in record:
        return _with_body(record, asking)
    if ("prompt" in record) == ("messages" in record):
        both = "both 'prompt' and 'messages'" if "prompt" in record else "no prompt"
        raise LineError(f"the line has {both}; it must be {_FORMS}")
    if settings := sorted(_SETTINGS & record.keys()):
        raise LineError(
            f"{settings[0]}: only a line with a body has settings of its own: give the option to "
            f'the command, or write {{"custom_id": "...", "body": {{...}}}}'
        )
    if "prompt" in record:
        return _text_line(_own_fields(record), asking)
    return _conversation(_own_fields(record), asking)


def malformed(line: bytes, message: str, number: int) -> Record:
    """The line of output for a line that was not understood."""
    try:
        record = _object(line)
    except LineError:
        record = {}
    if "body" in record:
        return _Body.document(record.get("custom_id"), number, error=_error(message, number))
    return _own_fields(record) | {"error": _error(message, number)}


def _own_fields(record: Record) -> Record:
    """A line without what an earlier run has written into it."""
    written = _OUTCOME | {"answer"} if "prompt" in record else _OUTCOME
    return {name: value for name, value in record.items() if name not in written}


def _object(line: bytes) -> Record:
    if not line.strip():
        raise LineError(f"the line is empty; it must be {_FORMS}")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LineError(f"no UTF-8 text (byte {error.start} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise LineError(f"no JSON ({error})") from None
    if not isinstance(record, dict):
        raise LineError(f"a JSON {type(record).__name__}, and no object; it must be {_FORMS}")
    return record


def _error(message: str, number: int) -> Record:
    return {"line": number, "message": message}


@dataclass(frozen=True)
class _Text:
    """A text to continue, or the user's message in ``conversation``."""

    record: Record
    prompt: str | list[Message]
    sampling: Sampling

    def request(self, engine: Engine, number: int) -> Request:
        return engine.request(self.prompt, self.sampling, request_number=number)

    def answered(self, result: Result, number: int) -> Record:
        return self.record | {"answer": result.text} | _outcome(result)

    def failed(self, message: str, number: int) -> Record:
        return self.record | {"error": _error(message, number)}


@dataclass(frozen=True)
class _Conversation:
    """A conversation to answer."""

    record: Record
    messages: list[Message]
    sampling: Sampling

    def request(self, engine: Engine, number: int) -> Request:
        return engine.request(self.messages, self.sampling, request_number=number)

    def answered(self, result: Result, number: int) -> Record:
        answer = {"role": "assistant", "content": result.text}
        return self.record | {"messages": [*self.messages, answer]} | _outcome(result)

    def failed(self, message: str, number: int) -> Record:
        return self.record | {"error": _error(message, number)}


def _outcome(result: Result) -> Record:
    return {"finish_reason": result.finish_reason, "num_tokens": len(result.token_ids)}


def _text_line(record: Record, asking: Asking) -> _Text:
    text = record["prompt"]
    if not isinstance(text, str):
        raise LineError(f"'prompt' is a JSON {type(text).__name__}; it must be a string")
    if not asking.chat:
        return _Text(record, text, asking.sampling)
    system = [] if asking.system is None else [{"role": "system", "content": asking.system}]
    messages = _messages([*system, {"role": "user", "content": text}])
    return _Text(record, messages, asking.sampling)


def _conversation(record: Record, asking: Asking) -> _Conversation:
    messages = _without_answer(_messages(record["messages"]))
    return _Conversation(record | {"messages": messages}, messages, asking.sampling)


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise LineError("'messages' must be a list of messages with role and content")
    try:
        return list(check_messages(value))
    except OutriderError as error:
        raise LineError(str(error)) from None


def _without_answer(messages: list[Message]) -> list[Message]:
    """The conversation up to its last answer, which is written anew."""
    is_answered = len(messages) > 1 and messages[-1]["role"] == "assistant"
    return messages[:-1] if is_answered else messages


@dataclass(frozen=True)
class _Body:
    """A request in the format of OpenAI's batches."""

    custom_id: str | None
    url: str
    fields: GenerationFields
    prompt: Any
    max_new_tokens: int | None
    asking: Asking

    def request(self, engine: Engine, number: int) -> Request:
        name, asked = self.asking.model_name, self.fields.model
        if asked is not None and asked != name:
            raise LineError(f"model {asked[:200]!r} does not exist: this batch runs {name!r}")
        ids = engine.encode(self.prompt)
        sampling = self.fields.sampling(
            self.max_new_tokens or engine.limit - len(ids), None, self.fields.grammar
        )
        if self.fields.seed is None:
            sampling = replace(sampling, seed=self.asking.sampling.seed)
        return engine.request(ids, sampling, request_number=number)

    def answered(self, result: Result, number: int) -> Record:
        from outrider.serve.choice import FINISH_REASONS

        choice: Record = {"index": 0, "logprobs": None}
        if self.url == _CHAT:
            head = {"id": f"chatcmpl-{number}", "object": "chat.completion"}
            choice["message"] = {"role": "assistant", "content": result.text, "refusal": None}
        else:
            head = {"id": f"cmpl-{number}", "object": "text_completion"}
            choice["text"] = result.text
        choice["finish_reason"] = FINISH_REASONS[result.finish_reason]
        num_prompt, num_output = len(result.prompt_ids), len(result.token_ids)
        body = head | {
            "created": 0,
            "model": self.asking.model_name,
            "choices": [choice],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_output,
                "total_tokens": num_prompt + num_output,
            },
        }
        response = {"status_code": 200, "request_id": f"req_{number}", "body": body}
        return self.document(self.custom_id, number, response=response)

    def failed(self, message: str, number: int) -> Record:
        return self.document(self.custom_id, number, error=_error(message, number))

    @staticmethod
    def document(
        custom_id: Any,
        number: int,
        *,
        response: Record | None = None,
        error: Record | None = None,
    ) -> Record:
        """A line of output in the format of OpenAI's batches."""
        line = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response}
        return line | {"error": None if error is None else {"code": "invalid_request"} | error}


def _with_body(record: Record, asking: Asking) -> _Body:
    unknown = sorted(record.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        raise LineError(f"{unknown[0]}: unknown beside custom_id, method, url and body")
    custom_id, body = record.get("custom_id"), record["body"]
    if custom_id is not None and not isinstance(custom_id, str):
        raise LineError("custom_id: must be a string")
    if not isinstance(body, dict):
        raise LineError(f"'body' is a JSON {type(body).__name__}; it must be an object")
    url = record.get("url", _CHAT if "messages" in body else _COMPLETIONS)
    if url not in (_CHAT, _COMPLETIONS) or record.get("method", "POST") != "POST":
        raise LineError(f"method and url: a batch knows POST {_CHAT} and POST {_COMPLETIONS} only")
    return _parsed(custom_id, url, body, asking)


def _parsed(custom_id: str | None, url: str, body: Mapping[str, Any], asking: Asking) -> _Body:
    try:
        from pydantic import ValidationError

        from outrider.serve.chat import ChatRequest
        from outrider.serve.completions import DEFAULT_TOKENS, CompletionRequest
        from outrider.serve.errors import ApiError
    except ImportError as error:
        raise OutriderError(
            f"lines with a body need {error.name}: pip install 'outrider[serve]'"
        ) from error
    try:
        if url == _CHAT:
            chat = ChatRequest.model_validate(body)
            _require_single_output(chat, body)
            messages = [each.message for each in chat.messages]
            return _Body(custom_id, url, chat, messages, chat.max_new_tokens, asking)
        text = CompletionRequest.model_validate(body)
    except ValidationError as error:
        raise LineError(_first(error)) from None
    except ApiError as error:
        raise LineError(str(error)) from None
    _require_single_output(text, body)
    if len(text.prompt) != 1:
        raise LineError(f"prompt: {len(text.prompt)} prompts; write one line for each")
    most = DEFAULT_TOKENS if text.max_tokens is None else max(text.max_tokens, 1)
    return _Body(custom_id, url, text, text.prompt[0], most, asking)


_SERVER_ONLY = (
    "stream logprobs top_logprobs tools tool_choice prediction echo add_special_tokens method "
    "method_options num_speculative_tokens divergence_budget return_token_origins "
    "return_token_ids return_pieces return_rounds speculation_metrics"
).split()


def _require_single_output(fields: GenerationFields, body: Mapping[str, Any]) -> None:
    """Raises LineError for what only a server does."""
    if fields.num_choices != 1:
        raise LineError(f"n={fields.num_choices}: a line has one output; write it {fields.n} times")
    for name in _SERVER_ONLY:
        value = body.get(name)
        if value is not None and value is not False and value != [] and value != {}:
            raise LineError(f"{name}: only `outrider serve` has this field: leave it out")


def _first(error: ValidationError) -> str:
    """The first of pydantic's errors on one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
