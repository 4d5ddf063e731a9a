"""The grammar of an answer that must be calls of functions, or may be.

Between the marks of the model's format, each call is fixed text around the function's arguments,
which obey the function's JSON schema.
"""

import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from outrider.core.errors import OutriderError
from outrider.engine.grammar import check_grammar
from outrider.sampling import Grammar
from outrider.serve.errors import ApiError
from outrider.serve.tools.fields import FunctionFields, ToolUse, schema_of
from outrider.serve.tools.formats import CallFormat

_SPACING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""Arguments are spaced as in chat templates, so that no choice of spaces is left to the model."""

_ANY_TEXT = "TEXT: /(.|\\n)*/"
_OTHER_TEXT = "TEXT: /([^{\\[](.|\\n)*)?/"


def grammar_of(
    use: ToolUse, format: CallFormat, tokenizer: PreTrainedTokenizerBase, answer: Grammar | None
) -> Grammar | None:
    """What an answer with calls may be; None where it may be anything.

    Args:
        use: the functions.
        format: how the model writes calls.
        tokenizer: the model's; marks may be special tokens of it.
        answer: what the answer must be if it calls nothing; a JSON schema, or None for any text.

    Raises:
        ApiError: a schema is wrong, or the answer's grammar cannot stand beside calls.
    """
    is_strict = any(each.strict for each in use.functions)
    if not use.required and not is_strict and answer is None:
        return None
    if answer is not None and (use.required or answer.kind != "json_schema"):
        raise ApiError(
            "tools: the answer must be calls, or a JSON document of response_format beside them: "
            "leave out structured_outputs, or with a tool_choice that demands calls all formats",
            param="tool_choice" if use.required else "structured_outputs",
        )
    for number, each in enumerate(use.functions):
        _check(number, each)
    marks = _Marks(format, tokenizer)
    rules = marks.calls(use.parallel)
    rules += _functions(use, format)
    if use.required:
        rules.insert(0, "start: calls")
    elif answer is not None:
        rules[:0] = ["start: calls | answer", f"answer: %json {answer.source}"]
    else:
        rules[:0] = marks.text_or_calls()
    return Grammar.grammar("\n".join(rules) + "\n")


class _Marks:
    """The marks of a format as parts of rules."""

    def __init__(self, format: CallFormat, tokenizer: PreTrainedTokenizerBase) -> None:
        self._format = format
        self._ids = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }

    def calls(self, parallel: bool) -> list[str]:
        """The rule of one or several calls with their marks."""
        form = self._format
        begin, end = self._terminal(form.begin), self._terminal(form.end)
        between = _literal(form.between)
        inside, outside = "call", "marked"
        if parallel and form.repeats:
            outside = f"marked ({between} marked)*"
        elif parallel:
            inside = f"call ({between} call)*"
        parts = [begin, _literal(form.before), inside, _literal(form.after), end]
        return [f"calls: {outside}", f"marked: {' '.join(filter(None, parts))}"]

    def text_or_calls(self) -> list[str]:
        """The rules of text in which calls obey their schemas. Without a visible mark, an answer
        that begins as a call does is one."""
        form = self._format
        if not form.repeats:
            return ["start: calls | TEXT", _OTHER_TEXT]
        after = f"{_literal(form.before)} call {_literal(form.after)} {self._terminal(form.end)}"
        rules = ["start: tagged* TEXT", _ANY_TEXT]
        if form.begin in self._ids:
            return [*rules, f"tagged: TEXT {self._terminal(form.begin)} {after}"]
        return [
            *rules,
            f"opening[lazy]: TEXT {_literal(form.begin)}",
            f"tagged: opening {after}",
        ]

    def _terminal(self, mark: str) -> str:
        return f"<[{self._ids[mark]}]>" if mark in self._ids else _literal(mark)


def _functions(use: ToolUse, format: CallFormat) -> list[str]:
    """The rule of a call, by functions."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(use.functions)))]
    for number, each in enumerate(use.functions):
        head = f'{{"name": {json.dumps(each.name)}, "{format.arguments}": '
        free = not use.required and not each.strict
        schema = {"type": "object"} if free else schema_of(each)
        schema = {**schema, "x-guidance": _SPACING}
        rules.append(f'call_{number}: {_literal(head)} %json {json.dumps(schema)} "}}"')
    return rules


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _check(number: int, function: FunctionFields) -> None:
    """Raises ApiError for a schema that cannot be obeyed, naming the function."""
    try:
        check_grammar(Grammar.json_schema(schema_of(function)))
    except OutriderError as error:
        raise ApiError(f"tools[{number}].function.parameters: {error}", param="tools") from error


def names_of(functions: Sequence[FunctionFields]) -> frozenset[str]:
    """The names of functions."""
    return frozenset(each.name for each in functions)
