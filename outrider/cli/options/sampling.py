"""Options that choose the sampling distribution and the stop conditions."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.errors import fail

if TYPE_CHECKING:
    from outrider.sampling import Sampling

SAMPLING = "Sampling"

Temperature = Annotated[
    float,
    typer.Option(
        metavar="T",
        help="0 always takes the most probable token; 1 leaves the distribution unchanged.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        metavar="K", help="Keep the K most probable tokens; 0 is off.", rich_help_panel=SAMPLING
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        metavar="P",
        help="Keep the most probable tokens up to a total probability of P; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        metavar="P",
        help="Keep tokens at least P times as probable as the most probable one; 0 is off.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Divides the positive logits of tokens that occur in the prompt or the output, and "
        "multiplies the negative ones; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
OwnRepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Divides the positive logits of tokens that occur in the prompt or the output, and "
        "multiplies the negative ones; 1 is off. Default: the model's, else 1.",
        rich_help_panel=SAMPLING,
    ),
]
OwnTemperature = Annotated[
    float | None,
    typer.Option(
        metavar="T",
        help="0 always takes the most probable token; 1 leaves the distribution unchanged. "
        "Default: the model's, else 1.",
        rich_help_panel=SAMPLING,
    ),
]
OwnTopK = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Keep the K most probable tokens; 0 is off. Default: the model's, else 0.",
        rich_help_panel=SAMPLING,
    ),
]
OwnTopP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Keep the most probable tokens up to a total probability of P; 1 is off. Default: "
        "the model's, else 1.",
        rich_help_panel=SAMPLING,
    ),
]
OwnMinP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Keep tokens at least P times as probable as the most probable one; 0 is off. "
        "Default: the model's, else 0.",
        rich_help_panel=SAMPLING,
    ),
]
NoGenerationConfig = Annotated[
    bool,
    typer.Option(
        "--no-generation-config",
        help="Ignore the target's generation config: its temperature, penalties and forbidden "
        "tokens.",
        rich_help_panel=SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Subtracted from the logits of tokens that occur in the output.",
        rich_help_panel=SAMPLING,
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Subtracted from the logits of tokens in the output, once per occurrence.",
        rich_help_panel=SAMPLING,
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=BIAS",
        help="Add BIAS to the logit of token ID; -inf forbids it. May be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N", help="Random seed; equal seeds give equal outputs.", rich_help_panel=SAMPLING
    ),
]
SeedOrNone = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Random seed; equal seeds give equal outputs. Default: another one each time.",
        rich_help_panel=SAMPLING,
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        "-n",
        metavar="N",
        help="Maximum number of new tokens.",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help=r"Stop before this string; in bash, $'\n\n' is an empty line. May be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ID", help="Stop after this token. May be repeated.", rich_help_panel=SAMPLING
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", help="Continue after an end-of-sequence token.", rich_help_panel=SAMPLING
    ),
]


JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="SCHEMA",
        help="Write JSON of this schema: a file, or the schema itself; '{}' stands for any JSON. "
        "Needs the extra 'grammar'.",
        rich_help_panel=SAMPLING,
    ),
]


@dataclass(frozen=True)
class Truncation:
    """Temperature and truncation of the distribution."""

    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0


@dataclass(frozen=True)
class OwnTruncation:
    """Temperature and truncation; None takes the value of the model's generation config."""

    temperature: OwnTemperature = None
    top_k: OwnTopK = None
    top_p: OwnTopP = None
    min_p: OwnMinP = None


@dataclass(frozen=True)
class Penalties:
    """Penalties for tokens that have occurred."""

    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0


@dataclass(frozen=True)
class OwnPenalties:
    """Penalties for tokens that have occurred; None takes the value of the generation config."""

    repetition_penalty: OwnRepetitionPenalty = None
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0


def sampling_of(
    truncation: OwnTruncation,
    penalties: OwnPenalties,
    *,
    logit_bias: dict[int, float],
    seed: int | None,
    max_new_tokens: int,
    stop: list[str] | None,
    stop_token_id: list[int] | None,
    ignore_eos: bool,
    logprobs: int | None = None,
    json_schema: str | None = None,
) -> "Sampling":
    """The sampling parameters that these options stand for. Imports torch."""
    from outrider.sampling import Grammar, Sampling

    return Sampling(
        **vars(truncation),
        **vars(penalties),
        logit_bias=logit_bias,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=(*(stop or ()), *(stop_token_id or ())),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        grammar=None if json_schema is None else Grammar.json_schema(_schema(json_schema)),
    )


def _schema(given: str) -> str:
    """The schema that an option holds, or the file that it names."""
    if given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise fail(f"--json-schema {given}: cannot read the file: {reason}") from None


def parse_logit_bias(items: list[str] | None) -> dict[int, float]:
    """``["5=-inf", "7=2"]`` as a mapping."""
    biases = {}
    for item in items or ():
        token, equals, bias = item.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            equals = ""
        if not equals:
            raise fail(f"--logit-bias {item!r}: write ID=BIAS, such as 42=-5 or 42=-inf")
    return biases
