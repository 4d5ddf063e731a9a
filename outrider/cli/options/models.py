"""Which models, and how they run."""

from dataclasses import dataclass
from typing import Annotated

import typer

MODELS = "Models"
EMBEDDED = "embedded"


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


Target = Annotated[
    str,
    typer.Option(
        "--target",
        "--model",
        "-m",
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
KvDtype = Annotated[
    str,
    typer.Option(
        metavar="DTYPE",
        help="How keys and values are stored: auto (as the models compute), bfloat16 or int8. The "
        "text is then that of the target with such KV buffers.",
        autocompletion=_complete_kv_dtypes,
        rich_help_panel=MODELS,
    ),
]
Compile = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        help="off; auto (kernels for few tokens, compiled graphs for every pass: three minutes of "
        "processor time for the embedded pair the first time, then kept); max (the compiler also "
        "tries several ways to multiply).",
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


@dataclass(frozen=True)
class Models:
    """A pair and how it runs."""

    target: Target = EMBEDDED
    draft: Draft = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False
    quantize_draft: QuantizeDraft = None
    quantize_target: QuantizeTarget = None
    kv_dtype: KvDtype = "auto"
    compile: Compile = "off"
    exact: Exact = False
