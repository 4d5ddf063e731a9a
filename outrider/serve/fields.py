"""What requests may say: the fields that all kinds of generation share, and what is refused.

A field that the server does not know, or does not implement, is refused by its name, unless its
value asks for nothing. No field is ignored but ``user`` and ``metadata``, which are for the
client's own records.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from outrider.sampling import Grammar, Sampling

MAX_CHOICES = 128
Neutral = Mapping[str, Sequence[object]]
"""Fields that are not implemented, and the values with which each asks for nothing."""

_INT64 = {"ge": -(2**63), "le": 2**63 - 1}


class Body(BaseModel):
    """A JSON object of known fields, each of its own type: a number is not read from a string.

    Attributes:
        NEUTRAL: the fields that are not implemented, and the values with which they ask for
            nothing, beside null.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )
    NEUTRAL: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, values in cls.NEUTRAL.items():
            value = body.get(name)
            if value is not None and not any(_is_same(value, each) for each in values):
                only = f"; only {_listed(values)} is" if values else ""
                raise ValueError(f"{name}: the field is not supported{only}: leave it out")
        return {name: value for name, value in body.items() if name not in cls.NEUTRAL}

    @model_validator(mode="before")
    @classmethod
    def _without_surrogates(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name, value in body.items():
                if not _is_text([str(name), value]):
                    raise ValueError(
                        f"{name}: a lone surrogate in a string, such as '\\ud800', is no text: "
                        f"leave it out"
                    )
        return body


def _is_text(value: object) -> bool:
    """Whether all strings in a JSON value can be written as UTF-8; JSON may escape others."""
    if isinstance(value, str):
        if value.isascii():
            return True
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    if isinstance(value, list):
        return all(map(_is_text, value))
    if isinstance(value, dict):
        return all(_is_text(key) and _is_text(each) for key, each in value.items())
    return True


def _is_same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral


def _listed(values: Sequence[object]) -> str:
    return " or ".join(repr(value) for value in values)


class StreamOptions(Body):
    """What a stream says besides its text."""

    NEUTRAL: ClassVar[Neutral] = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """A schema, under OpenAI's names."""

    NEUTRAL: ClassVar[Neutral] = {"strict": (True, False), "description": ()}

    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    """What the output looks like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: for type 'json_schema', and needed there")
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.json_schema is not None:
            return Grammar.json_schema(self.json_schema.schema_)
        return Grammar.json_object() if self.type == "json_object" else None


class StructuredOutputs(Body):
    """What the output looks like, under vLLM's names; one of them."""

    NEUTRAL: ClassVar[Neutral] = {
        "structural_tag": (),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
    }

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar_: Annotated[str | None, Field(alias="grammar")] = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredOutputs":
        if sum(getattr(self, name) is not None for name in type(self).model_fields) != 1:
            raise ValueError("structured_outputs: one of json, json_object, regex, choice, grammar")
        return self

    @property
    def grammar(self) -> Grammar:
        if self.json_ is not None:
            return Grammar.json_schema(self.json_)
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.choice is not None:
            return Grammar.choice(self.choice)
        if self.grammar_ is not None:
            return Grammar.grammar(self.grammar_)
        return Grammar.json_object()


def _strings(value: Any) -> Any:
    """A string, or several."""
    listed = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(each, str) for each in listed):
        raise ValueError("must be a string or a list of strings")
    return value


class SpeculationFields(Body):
    """How a request is decoded, which clients send as ``extra_body``."""

    method: str | None = None
    method_options: dict[str, float | int | bool | str] | None = None
    num_speculative_tokens: int | None = None
    divergence_budget: float | None = Field(None, ge=0)
    return_token_origins: bool | None = None
    return_token_ids: bool | None = None
    return_pieces: bool | None = None
    return_rounds: bool | None = None
    speculation_metrics: Literal["summary", "detailed"] | None = None


class GenerationFields(SpeculationFields):
    """The sampling parameters that all kinds of generation have."""

    NEUTRAL: ClassVar[Neutral] = {
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "cache_salt": (),
        "include_stop_str_in_output": (False,),
        "min_tokens": (0,),
        "priority": (0,),
        "prompt_logprobs": (),
        "return_tokens_as_token_ids": (False,),
        "service_tier": ("auto", "default"),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "stream_interval": (1,),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
    }

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(**_INT64)] | None = None
    stop: Annotated[str | list[str] | None, BeforeValidator(_strings)] = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _stream_options_of_a_stream(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only for stream=true")
        return self

    @model_validator(mode="after")
    def _token_ids_as_keys(self) -> "GenerationFields":
        for key in self.logit_bias or ():
            if not (key.isascii() and key.isdigit()) or len(key) > 9:
                raise ValueError(f"logit_bias: {key[:40]!r} is no token id, such as '42'")
        return self

    @model_validator(mode="after")
    def _one_format(self) -> "GenerationFields":
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("structured_outputs: leave out response_format beside it")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """What the output may be; None for any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.grammar
        return None if self.response_format is None else self.response_format.grammar

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    def sampling(
        self, max_new_tokens: int, logprobs: int | None, grammar: Grammar | None
    ) -> Sampling:
        """The parameters for the engine. Without a seed of the client's, outputs differ from
        request to request.

        Args:
            max_new_tokens: most tokens of the output.
            logprobs: as in ``Sampling``.
            grammar: what the output may be.

        Raises:
            InvalidParameterError: a value outside its domain.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            temperature=self.temperature,
            top_k=0 if self.top_k == -1 else self.top_k,  # vLLM's word for off
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias={int(key): bias for key, bias in (self.logit_bias or {}).items()},
            seed=self.seed,
            max_new_tokens=max_new_tokens,
            stop=(*stop, *(self.stop_token_ids or ())),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            grammar=grammar,
        )
