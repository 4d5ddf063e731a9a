"""Options that several commands share, each stated once.

Defaults are written where the command is; a test holds them equal to those of ``Sampling`` and
``load``.
"""

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.errors import fail

MODELS, SPECULATION, SAMPLING, OUTPUT = "Models", "Speculation", "Sampling", "Output"


def complete_methods() -> list[str]:
    """Names of methods, for the shell."""
    from outrider.methods import METHODS

    return list(METHODS)


def _complete_dtypes() -> list[str]:
    return ["auto", "bfloat16", "float16", "float32", "float64"]


def _complete_kv_dtypes() -> list[str]:
    return ["auto", "bfloat16", "int8"]


def _complete_compile() -> list[str]:
    return ["off", "auto", "max"]


def _complete_devices() -> list[str]:
    return ["auto", "cpu", "cuda", "mps"]


def _complete_kinds() -> list[str]:
    return ["int8", "int4"]


def _complete_lengths() -> list[str]:
    return ["fixed", "heuristic", "confidence:0.4", "survival:0.3"]


Target = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="The model whose text you want: a local folder, a Hugging Face id, or 'embedded', "
        "the small one that comes with Outrider.",
        rich_help_panel=MODELS,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The small model that rides ahead; it needs the target's tokenizer. The embedded "
        "target has one of its own.",
        rich_help_panel=MODELS,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="DTYPE",
        help="auto, bfloat16, float16, float32 or float64; auto is bfloat16 where the hardware "
        "computes in it, else float32.",
        autocompletion=_complete_dtypes,
        rich_help_panel=MODELS,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="cpu, cuda, cuda:N, mps, or auto.",
        autocompletion=_complete_devices,
        rich_help_panel=MODELS,
    ),
]
KvDtypeName = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        metavar="DTYPE",
        help="How keys and values are stored: auto (as the models compute), bfloat16 or int8. The "
        "text is then that of the target with such slabs.",
        autocompletion=_complete_kv_dtypes,
        rich_help_panel=MODELS,
    ),
]
CompileLevel = Annotated[
    str,
    typer.Option(
        "--compile",
        metavar="LEVEL",
        help="off; auto (kernels for few tokens, each model one compiled graph: half a minute the "
        "first time, then kept); max (the compiler also tries several ways to multiply).",
        autocompletion=_complete_compile,
        rich_help_panel=MODELS,
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="The same bits for a token whatever else is in the pass: greedy text is plain "
        "decoding's, token for token, in any precision. On a CPU.",
        rich_help_panel=MODELS,
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Most memory for keys and values, target's and draft's together, such as 512MiB or "
        "2GB. Default: what the machine has.",
        rich_help_panel=MODELS,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python code that comes with a model. Only for authors you trust.",
        rich_help_panel=MODELS,
    ),
]
QuantizeDraft = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="int8 or int4 weights for the draft, through torchao: less to read per step, and "
        "what was lossless stays so.",
        autocompletion=_complete_kinds,
        rich_help_panel=MODELS,
    ),
]
QuantizeTarget = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="The same for the target, whose text it changes.",
        autocompletion=_complete_kinds,
        rich_help_panel=MODELS,
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="How to decode; `outrider methods` lists the names. 'plain' is the target alone.",
        autocompletion=complete_methods,
        rich_help_panel=SPECULATION,
    ),
]
MethodOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="A parameter of the method, such as budget=0.2 for 'mentored'; `outrider methods` "
        "lists them. May be repeated.",
        rich_help_panel=SPECULATION,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="γ: most tokens to draft before the target checks them, 1 to 64; of a tree, its most "
        "levels. Default: a tree's own depth, else 5.",
        rich_help_panel=SPECULATION,
    ),
]
DraftConfidence = Annotated[
    float,
    typer.Option(
        metavar="P",
        help="Stop drafting after a token the draft gave less than this probability; 0 never.",
        rich_help_panel=SPECULATION,
    ),
]
DraftLength = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="fixed; heuristic or heuristic:START, which follows what was accepted, up to "
        "--num-speculative-tokens (20 if not set); confidence:C, as --draft-confidence; "
        "survival:THETA, which stops once the drafted tokens are less than 1 - THETA probable.",
        autocompletion=_complete_lengths,
        rich_help_panel=SPECULATION,
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="T",
        help="0 always takes the most probable token; 1 samples from the model as it is.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int,
    typer.Option(metavar="K", help="Keep the K best tokens; 0 is off.", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float,
    typer.Option(
        metavar="P",
        help="Keep the best tokens that hold this much probability together; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        metavar="P",
        help="Keep tokens at least this fraction as probable as the best one; 0 is off.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Divides the logits of tokens already in prompt or text; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Subtracted from the logits of tokens already in the text.",
        rich_help_panel=SAMPLING,
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(metavar="X", help="The same, once per occurrence.", rich_help_panel=SAMPLING),
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
    typer.Option(metavar="N", help="The same seed gives the same text.", rich_help_panel=SAMPLING),
]
MaxNewTokens = Annotated[
    int, typer.Option(metavar="N", help="Most tokens to write.", rich_help_panel=SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help=r"End before this text; in bash, $'\n\n' is an empty line. May be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ID", help="End after this token. May be repeated.", rich_help_panel=SAMPLING
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", help="Go on past the end-of-sequence token.", rich_help_panel=SAMPLING
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --json: also the N most probable tokens at each place.",
        rich_help_panel=OUTPUT,
    ),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Also decode the same prompt plainly, and print both speeds and the speed-up.",
        rich_help_panel=OUTPUT,
    ),
]
Trace = Annotated[
    bool,
    typer.Option(
        "--trace",
        help="Colour each token by where it came from: accepted draft, correction, bonus.",
        rich_help_panel=OUTPUT,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document instead.", rich_help_panel=OUTPUT),
]
PromptArgument = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The text to continue; '-' reads standard input."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Take the prompt from this file, exactly as it is.",
    ),
]


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


def parse_method_options(items: list[str] | None) -> dict[str, str]:
    """``["budget=0.2"]`` as a mapping; values stay text, which the method reads."""
    values: dict[str, str] = {}
    for item in items or ():
        name, equals, value = item.partition("=")
        if not (name and equals and value):
            raise fail(f"--option {item!r}: write NAME=VALUE, such as budget=0.2")
        values[name.strip().replace("-", "_")] = value.strip()
    return values
