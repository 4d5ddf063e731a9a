"""``outrider distill``: trains a draft model for a target, on the target's own distributions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.errors import INTERRUPTED, fail, say
from outrider.cli.options.models import Device
from outrider.cli.options.training import (
    BOTH_TEMPERATURES,
    MEASURE,
    RUN,
    CheckpointEvery,
    LearningRate,
    MeasureTemperature,
    Resume,
    Tensorboard,
    check_choice,
)
from outrider.cli.start import start

if TYPE_CHECKING:
    from outrider.train.distill.settings import Start

_DATA, _START, _LOSS = "Data", "The draft", "The loss"
_RUN, _MEASURE = RUN, MEASURE


def _complete_data() -> list[str]:
    return ["ground-truth", "target", "draft", "replay", "mixture"]


def _complete_divergences() -> list[str]:
    return ["forward-kl", "reverse-kl", "js", "tv", "lk", "nla", "cross-entropy"]


def distill(
    target: Annotated[
        str,
        typer.Option(
            "--target",
            "-m",
            metavar="MODEL",
            help="The model to draft for: a folder, a Hugging Face id, a GGUF file, or 'embedded'.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder of the run: checkpoints, curves, and the draft in best/ and last/.",
        ),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Prompts: a file with one per line; JSON lines of strings, chat messages or "
            "{prompt, answer}; or a folder of text files.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    self_prompts: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Let the target write N prompts: a chat model that is given an empty user turn "
            "fills it in.",
            rich_help_panel=_DATA,
        ),
    ] = 0,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="What to train on. target: answers that the target samples; ground-truth: the "
            "prompts' own answers; draft: answers that the draft samples as it learns; replay: the "
            "same, with earlier ones kept; mixture: several, see --share.",
            autocompletion=_complete_data,
            rich_help_panel=_DATA,
        ),
    ] = "target",
    share: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA=X",
            help="Share of a kind of data in a mixture, such as target=0.7; may be repeated, and "
            "all must sum to 1. Default: target=0.5 and draft=0.5.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    text: Annotated[
        bool,
        typer.Option(
            "--text",
            help="Continue prompts as text, even if the target has a chat template.",
            rich_help_panel=_DATA,
        ),
    ] = False,
    max_prompts: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Train on N of the prompts only.", rich_help_panel=_DATA
        ),
    ] = None,
    answer_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Most tokens of a sampled answer.", rich_help_panel=_DATA
        ),
    ] = 256,
    answer_temperature: Annotated[
        list[float] | None,
        typer.Option(
            metavar="T",
            help="Temperature of the sampled answers; repeat it to answer each prompt at several. "
            "Default: --temperature.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    refresh_every: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Steps after which the draft samples new answers.",
            rich_help_panel=_DATA,
        ),
    ] = 20,
    refresh_prompts: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Prompts that it then answers.", rich_help_panel=_DATA
        ),
    ] = 64,
    replay_samples: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Samples that the replay buffer holds.",
            rich_help_panel=_DATA,
        ),
    ] = 1024,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Start from this model, which must have the target's tokenizer.",
            rich_help_panel=_START,
        ),
    ] = None,
    from_layers: Annotated[
        str | None,
        typer.Option(
            metavar="N or I,J,..",
            help="Start from N evenly spaced layers of the target, or from those numbered I,J,.. "
            "(from 0). Default: a fifth of them.",
            rich_help_panel=_START,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Start from scratch, with N layers; needs --width.",
            rich_help_panel=_START,
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=8,
            help="Hidden size of a draft from scratch. With the target's, it starts from the "
            "target's embeddings.",
            rich_help_panel=_START,
        ),
    ] = None,
    cost_ratio: Annotated[
        float | None,
        typer.Option(
            metavar="C",
            help="Start from scratch, with layers and width chosen so that the draft reads C times "
            "as many parameters per token as the target.",
            rich_help_panel=_START,
        ),
    ] = None,
    divergence: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="forward-kl, reverse-kl, js (Jensen-Shannon), tv (total variation, 1 - α), lk "
            "(KL where little is accepted, else tv), nla (-log α); or cross-entropy: training "
            "without the target's distributions, as a baseline.",
            autocompletion=_complete_divergences,
            rich_help_panel=_LOSS,
        ),
    ] = "forward-kl",
    beta: Annotated[
        float,
        typer.Option(
            metavar="B", help="Weight of the target in js, from 0 to 1.", rich_help_panel=_LOSS
        ),
    ] = 0.5,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T",
            help="Decoding temperature at which the distributions are compared.",
            rich_help_panel=_LOSS,
        ),
    ] = 1.0,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=0,
            help="Cache the target's K largest probabilities at each position, and the mass of "
            "all others. 0 caches nothing and runs the target in every step. Default: 64; 0 for "
            "reverse-kl.",
            rich_help_panel=_LOSS,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Training steps.", rich_help_panel=_RUN)
    ] = 1000,
    rows: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Packed rows per step.", rich_help_panel=_RUN),
    ] = 8,
    length: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=2,
            help="Tokens of a row; longer samples are cut.",
            rich_help_panel=_RUN,
        ),
    ] = 512,
    learning_rate: LearningRate = 1e-3,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="Of the training's matrix products: bfloat16, or float32. Weights are float32 in "
            "training; the draft is saved in bfloat16.",
            rich_help_panel=_RUN,
        ),
    ] = "bfloat16",
    batch_size: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Prompts that are answered at a time.", rich_help_panel=_RUN
        ),
    ] = 32,
    compile_: Annotated[
        str,
        typer.Option(
            "--compile",
            metavar="LEVEL",
            help="Compile the target for its answers: off; auto (graphs and CPU kernels; takes "
            "minutes the first time); max (also autotunes matrix products).",
            rich_help_panel=_RUN,
        ),
    ] = "off",
    device: Device = "auto",
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Seed of answers, order and weights.", rich_help_panel=_RUN
        ),
    ] = 0,
    checkpoint_every: CheckpointEvery = 50,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of answers and probabilities, which several runs may share. Default: "
            "OUT/cache.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    resume: Resume = True,
    tensorboard: Tensorboard = True,
    measure_every: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Steps between measurements on held-out prompts. The best goes to best/.",
            rich_help_panel=_MEASURE,
        ),
    ] = 250,
    measure_prompts: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Most held-out prompts to use.", rich_help_panel=_MEASURE
        ),
    ] = 16,
    measure_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Most tokens of their answers.", rich_help_panel=_MEASURE
        ),
    ] = 128,
    measure_temperature: MeasureTemperature = None,
) -> None:
    """Train a draft model for a target, on the target's own answers and probabilities.

    A draft for a chat model, from a fifth of its layers, on prompts that it writes itself:

      outrider distill --target DIR --self-prompts 2000 --out runs/draft

    Use it:

      outrider generate --target DIR --draft runs/draft/best --chat "Hello!"

    Ctrl-C stops a run at any time; the same command continues it.
    """
    check_choice("--dtype", dtype, ("bfloat16", "float32"))
    shares = _shares(share or [])
    start("outrider.train.distill.run")
    import torch

    from outrider.core.errors import OutriderError
    from outrider.train.checkpoint import CHECKPOINT
    from outrider.train.distill.run import distil
    from outrider.train.distill.settings import Data, Distillation, Measuring
    from outrider.train.loop import Interrupted, Settings
    from outrider.train.optim import Schedule

    if not resume:
        (out / CHECKPOINT).unlink(missing_ok=True)
    try:
        distil(
            Distillation(
                target,
                out,
                Data(
                    prompts,
                    self_prompts,
                    data,
                    shares,
                    text,
                    max_prompts,
                    answer_temperatures=tuple(answer_temperature or ()),
                    answer_tokens=answer_tokens,
                    refresh_every=refresh_every,
                    refresh_prompts=refresh_prompts,
                    replay_samples=replay_samples,
                ),
                _start(draft, from_layers, layers, width, cost_ratio),
                Settings(
                    Schedule(learning_rate, steps, min(steps // 10, 50), steps // 4),
                    dtype=getattr(torch, dtype),
                    checkpoint_every=checkpoint_every,
                    validate_every=measure_every,
                    tensorboard=tensorboard,
                ),
                divergence,
                beta,
                temperature,
                top_k,
                rows,
                length,
                batch_size,
                Measuring(
                    tuple(measure_temperature or BOTH_TEMPERATURES), measure_prompts, measure_tokens
                ),
                cache,
                compile_,
                device,
                seed=seed,
            )
        )
    except Interrupted as stop:
        say(f"stopped after step {stop}; run the same command again to continue")
        raise typer.Exit(INTERRUPTED) from None
    except OutriderError:
        raise
    except (ValueError, OSError) as error:
        raise fail(str(error).splitlines()[0]) from error


def _start(
    draft: str | None,
    from_layers: str | None,
    layers: int | None,
    width: int | None,
    cost_ratio: float | None,
) -> "Start":
    """What the draft starts from."""
    from outrider.train.distill.settings import Start
    from outrider.train.distill.shape import Shape

    if (layers is None) != (width is None):
        raise fail("a draft from scratch needs both --layers and --width")
    shape = None if layers is None or width is None else Shape(layers, width)
    chosen: int | tuple[int, ...] | None = None
    if from_layers is not None:
        try:
            numbers = tuple(int(number) for number in from_layers.split(","))
        except ValueError:
            raise fail(
                f"--from-layers {from_layers}: must be a number of layers, such as 4, or their "
                "numbers, such as 0,10,20,29"
            ) from None
        chosen = numbers if "," in from_layers else numbers[0]
    return Start(draft, chosen, shape, cost_ratio)


def _shares(given: list[str]) -> dict[str, float]:
    """The shares of a mixture."""
    shares = {}
    for item in given:
        name, _, value = item.partition("=")
        try:
            shares[name] = float(value)
        except ValueError:
            raise fail(f"--share {item}: must be such as target=0.7") from None
    return shares
