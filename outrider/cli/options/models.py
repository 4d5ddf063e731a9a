"""Options that choose the models and how they run."""

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
    from outrider.runtime.hf.quantize import KINDS  # torch takes long to import

    return list(KINDS)


Target = Annotated[
    str,
    typer.Option(
        "--target",
        "--model",
        "-m",
        metavar="MODEL",
        help="The target model: a local folder, a Hugging Face id, or 'embedded', the small model "
        "that comes with Outrider.",
        rich_help_panel=MODELS,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The draft model: a small model with the target's tokenizer. The embedded target has "
        "its own.",
        rich_help_panel=MODELS,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="DTYPE",
        help="auto, bfloat16, float16, float32 or float64; auto is bfloat16 if the hardware "
        "computes in bfloat16, else float32.",
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
        help="Run the Python code that comes with a model. Use it only for authors you trust.",
        rich_help_panel=MODELS,
    ),
]
QuantizeDraft = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Weights of few bits for the draft model or head, of the kinds of --quantize-target. "
        "Each draft step reads fewer bytes; lossless methods stay lossless.",
        autocompletion=_complete_kinds,
        rich_help_panel=MODELS,
    ),
]
QuantizeTarget = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Weights of few bits for the target: int8; int4; int8:32, int8:128, int4:32 or "
        "int4:128, in groups of 32 or 128 inputs; or keep, for the blocks of a GGUF file as they "
        "are. With +a8 behind one of those in groups, layers round their inputs to 8 bits, too, "
        "which is faster (int8:32+a8). All but keep change the output.",
        autocompletion=_complete_kinds,
        rich_help_panel=MODELS,
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        metavar="DTYPE",
        help="Number format of the KV cache: auto (the model's), bfloat16 or int8. The output "
        "then has the distribution of the target with such a KV cache.",
        autocompletion=_complete_kv_dtypes,
        rich_help_panel=MODELS,
    ),
]
Compile = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        help="off; auto (compiled programs, and CPU kernels for few tokens; what is compiled is "
        "kept in a cache, and outrider compile does it ahead; chat and serve answer meanwhile, "
        "other commands wait for it); max (the compiler also autotunes matrix products).",
        autocompletion=_complete_compile,
        rich_help_panel=MODELS,
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Make logits bit-identical whatever else is in the forward pass: greedy output then "
        "equals plain decoding's, token for token, in any precision. CPU only.",
        rich_help_panel=MODELS,
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory limit of the KV caches of target and draft together, such as 512MiB or 2GB. "
        "Default: the free memory of the machine.",
        rich_help_panel=MODELS,
    ),
]
PrefixCache = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Memory for the keys and values of the conversation so far, which the next turn then "
        "does not read again; 0 is off.",
        rich_help_panel=MODELS,
    ),
]


DemoCompile = Annotated[
    str,
    typer.Option(
        "--compile",
        metavar="LEVEL",
        help="off; auto or max (the models run by compiled programs, which are compiled first if "
        "they are missing; off if that takes more than two minutes).",
        autocompletion=_complete_compile,
        rich_help_panel=MODELS,
    ),
]


@dataclass(frozen=True)
class Models:
    """The pair of models and how it runs."""

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

    @property
    def compiles(self) -> bool:
        """Whether they are compiled, on a CPU unless there is a GPU."""
        return self.compile != "off" and self.device in ("auto", "cpu")


@dataclass(frozen=True)
class DemoModels(Models):
    """The same, compiled by default."""

    compile: DemoCompile = "auto"
