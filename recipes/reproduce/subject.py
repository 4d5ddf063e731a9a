"""The models and prompts that recipes run on, and how much they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.kinds import format_of
from outrider.lab.bench import DataSpec
from outrider.lab.data import Prompts
from outrider.runtime.executors.compiled import Compile
from recipes.reproduce.recipe import PaperModels

Kind = Literal["code", "free", "copy"]
"""Kinds of prompts: programs, prose, and outputs that repeat the prompt."""

TASKS = Path(__file__).parent / "prompts" / "tasks.jsonl"
SMOLLM2 = Path("runs/smollm2")
SMOLLM2_NAME = "SmolLM2-135M-Instruct"
SMOLLM2_DRAFT_SHAPE = "4x144"
"""Of the draft model that comes with the package."""
SMOLLM2_HEAD, SMOLLM2_DRAFT = "embedded:smollm2-eagle3", "embedded:smollm2-draft"


@dataclass(frozen=True)
class Size:
    """How much a recipe runs.

    Attributes:
        name: in results.
        prompts: of each kind.
        tokens: of each output.
        repeats: with other seeds.
        batch_size: requests that run together; 1 where times are measured.
        timed: whether times are measured. Otherwise speeds are counted: a target pass takes 1, a
            draft pass the ratio of the weights that each reads.
        dtype: of the models' weights; None takes what suits the machine. Quick runs name one, so
            that their verdicts are the same on every machine.
    """

    name: Literal["quick", "full"]
    prompts: int
    tokens: int
    repeats: int
    batch_size: int
    timed: bool
    dtype: str | None = None


QUICK = Size("quick", prompts=12, tokens=32, repeats=3, batch_size=12, timed=False, dtype="float32")
FULL = Size("full", prompts=8, tokens=96, repeats=3, batch_size=1, timed=True)


@dataclass(frozen=True)
class Subject:
    """A target with its drafts and prompts.

    Attributes:
        name: on pages.
        target: folder, hub id or ``embedded``.
        drafts: likewise; recipes that need one take the first.
        prompts: data set by kind.
        tasks: data set of several tasks, for comparisons across tasks.
        compile: as ``outrider.load``.
        heads: heads on the target; folders or ``embedded:NAME``.
    """

    name: str
    target: str
    drafts: tuple[str, ...]
    prompts: Mapping[Kind, DataSpec]
    tasks: DataSpec
    compile: Compile = "off"
    heads: tuple[str, ...] = ()


def embedded(compile: Compile = "off") -> Subject:
    """The pair that comes with the package: a target of 16 layers and a draft of one. The target is
    too small to repeat its prompt on its own, so that the outputs of ``copy`` are forced to be the
    references: what a model would write that can copy.

    Args:
        compile: as ``outrider.load``; quick runs, which count passes, are eager.
    """
    sets: dict[Kind, DataSpec] = {
        "code": DataSpec("builtin:code"),
        "free": DataSpec("builtin:prose"),
        "copy": DataSpec("builtin:copy", forced=True),
    }
    return Subject("embedded pair", "embedded", ("embedded",), sets, sets["code"], compile)


def of_models(
    name: str,
    target: str,
    drafts: Sequence[str],
    compile: Compile,
    prompts: Prompts = "chat",
) -> Subject:
    """Models of the user's or a paper's choice.

    Args:
        name: on pages.
        target: folder or hub id.
        drafts: likewise, the smallest first; and heads.
        compile: as ``outrider.load``.
        prompts: ``chat`` sends the prompts through the chat template, ``text`` continues them.
    """
    sets: dict[Kind, DataSpec] = {
        "code": DataSpec(str(TASKS), "code", ("code",), prompts=prompts),
        "free": DataSpec(str(TASKS), "free", ("free", "qa"), prompts=prompts),
        "copy": DataSpec(str(TASKS), "copy", ("copy", "summarisation", "rag"), prompts=prompts),
    }
    tasks = DataSpec(str(TASKS), "tasks", prompts=prompts)
    heads = tuple(each for each in drafts if format_of(each) is not None)
    models = tuple(each for each in drafts if each not in heads)
    return Subject(name, target, models, sets, tasks, compile, heads)


def smollm2(folder: Path = SMOLLM2, compile: Compile = "auto") -> Subject | None:
    """SmolLM2-135M-Instruct with the draft model and the head that come with the package, and draft
    models of other sizes that were trained for it; None where it has not been fetched."""
    target = folder / "model"
    if not (target / "config.json").is_file():
        return None
    drafts = sorted(
        (
            each.parent
            for each in folder.glob("distilled/*/best/config.json")
            if each.parent.parent.name != SMOLLM2_DRAFT_SHAPE
        ),
        key=_size_of_weights,
    )
    known = [SMOLLM2_DRAFT, *map(str, drafts), SMOLLM2_HEAD]
    return of_models(SMOLLM2_NAME, str(target), known, compile)


def smollm2_inflated(folder: Path = SMOLLM2, compile: Compile = "auto") -> Subject:
    """SmolLM2-135M-Instruct at the cost of a billion parameters, with its draft model: the
    same outputs and the same acceptance as :func:`smollm2`, and drafts that cost next to nothing.

    Raises:
        InvalidParameterError: the inflated target has not been made.
    """
    target = folder / "inflated"
    if not (target / "config.json").is_file():
        raise InvalidParameterError(
            f"{target} is missing: `python -m benchmarks.inflate --model {folder / 'model'} --out "
            f"{target}` makes it"
        )
    return of_models(
        f"{SMOLLM2_NAME} inflated to the cost of a billion parameters",
        str(target),
        [SMOLLM2_DRAFT],
        compile,
    )


def default_subjects(quick: bool, compile: Compile = "auto") -> list[Subject]:
    """SmolLM2 where it is there, and the embedded pair for recipes that need a draft model that
    SmolLM2 lacks; in quick runs the embedded pair alone."""
    if quick:
        return [embedded()]
    found = smollm2(compile=compile)
    return [embedded(compile)] if found is None else [found, embedded(compile)]


SUBJECTS: dict[str, Callable[[bool, Compile], list[Subject]]] = {
    "": default_subjects,
    "embedded": lambda quick, compile: [embedded("off" if quick else compile)],
    "inflated": lambda quick, compile: [smollm2_inflated(compile=compile)],
}
"""The subjects of a run by the name of a choice, from whether it is quick and how it compiles."""


def of_paper(models: PaperModels, compile: Compile = "auto") -> Subject:
    """The models of a paper, most of which have no chat template."""
    return of_models(models.target, models.target, models.drafts, compile, "text")


def _size_of_weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
