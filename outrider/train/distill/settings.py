"""What a distillation is told: data, start, measurement, and the numbers of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from outrider.core.errors import InvalidParameterError
from outrider.runtime import HFModel
from outrider.runtime.hf.load import check_vocabularies
from outrider.runtime.kernels.build import find_compiler
from outrider.train.distill.answers import Answering
from outrider.train.distill.shape import Shape, parameters_read, shape_for_cost
from outrider.train.distill.sources import interleaved
from outrider.train.distill.start import evenly_spaced, from_folder, from_layers, from_scratch
from outrider.train.loop import Settings
from outrider.train.losses import DIVERGENCES
from outrider.train.models import num_parameters

EMBEDDED = "embedded"
GROUND_TRUTH, TARGET, DRAFT, REPLAY, MIXTURE = (
    "ground-truth",
    "target",
    "draft",
    "replay",
    "mixture",
)
DATA = (GROUND_TRUTH, TARGET, DRAFT, REPLAY, MIXTURE)
CROSS_ENTROPY = "cross-entropy"
REVERSE_KL = "reverse-kl"
LOSSES = (*DIVERGENCES, CROSS_ENTROPY)
DEFAULT_MIXTURE = {TARGET: 0.5, DRAFT: 0.5}


@dataclass(frozen=True)
class Data:
    """What to train on.

    Attributes:
        prompts: a file or folder (``prompts.py``).
        self_prompts: how many prompts the target writes, instead of or beside the file's.
        kind: one of ``DATA``.
        shares: of a mixture, by kind.
        as_text: continue strings as text, even where the target has a chat template.
        max_prompts: most prompts to train on; None for all.
        prompt_tokens: tokens of a document's windows that are the prompt.
        answer_temperatures: at which prompts are answered; empty for the decoding temperature.
        answer_tokens: most tokens of an answer.
        refresh_every: steps between two refreshes of the draft's own samples.
        refresh_prompts: prompts that the draft answers at each.
        replay_samples: samples that a replay buffer holds.
    """

    prompts: Path | None = None
    self_prompts: int = 0
    kind: str = TARGET
    shares: Mapping[str, float] = field(default_factory=dict)
    as_text: bool = False
    max_prompts: int | None = None
    prompt_tokens: int = 64
    answer_temperatures: tuple[float, ...] = ()
    answer_tokens: int = 256
    refresh_every: int = 20
    refresh_prompts: int = 64
    replay_samples: int = 1024

    def __post_init__(self) -> None:
        if self.kind not in DATA:
            raise InvalidParameterError(f"data={self.kind!r}: must be one of {', '.join(DATA)}")
        if self.prompts is None and not self.self_prompts:
            raise InvalidParameterError(
                "no prompts: give a file or folder, or let the target write some (self_prompts)"
            )
        unknown = [name for name in self.shares if name not in DATA[:-1]]
        if unknown or (self.shares and self.kind != MIXTURE):
            raise InvalidParameterError(
                f"shares={dict(self.shares)}: only data='mixture' has shares, of "
                f"{', '.join(DATA[:-1])}"
            )
        interleaved(self.mixture)  # an error for shares that are none, before hours of answers
        for name in ("answer_tokens", "refresh_every", "refresh_prompts", "replay_samples"):
            if getattr(self, name) < 1:
                raise InvalidParameterError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def mixture(self) -> dict[str, float]:
        """The share of each kind."""
        if self.kind != MIXTURE:
            return {self.kind: 1.0}
        return dict(self.shares or DEFAULT_MIXTURE)


@dataclass(frozen=True)
class Start:
    """What the draft starts from: at most one of these; without any, a fifth of the target's
    layers, evenly spaced.

    Attributes:
        folder: an existing model.
        layers: some of the target's layers, by number, or how many evenly spaced ones.
        shape: layers and width of a new model.
        cost_ratio: parameters read per token relative to the target's, of a new model.
    """

    folder: str | Path | None = None
    layers: Sequence[int] | int | None = None
    shape: Shape | None = None
    cost_ratio: float | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) > 1:
            raise InvalidParameterError(
                f"the draft starts from {' and '.join(given)}; give one of a model, layers of the "
                "target, a shape, or a cost ratio"
            )

    def build(self, target: HFModel, seed: int, console: Console) -> PreTrainedModel:
        """The draft, in float32; says what was chosen."""
        if self.folder is not None:
            model = from_folder(self.folder)
            check_vocabularies(target, model)
            return model.module
        if self.shape is not None or self.cost_ratio is not None:
            shape = self.shape or shape_for_cost(target.module, self.cost_ratio or 0)
            draft = from_scratch(target.module, shape, seed)
            what = (
                f"a new model of {shape.layers} layers, width {shape.width}, {shape.heads} heads "
                f"({shape.kv_heads} key-value), FFN {shape.ffn}"
            )
        else:
            count = target.num_layers
            wanted = max(1, round(count / 5)) if self.layers is None else self.layers
            layers = evenly_spaced(wanted, count) if isinstance(wanted, int) else tuple(wanted)
            draft = from_layers(target.module, layers)
            what = f"layers {', '.join(map(str, layers))} of the target's {count}"
        ratio = parameters_read(draft) / parameters_read(target.module)
        console.print(
            f"the draft: {what}; {num_parameters(draft):,} parameters, it reads {ratio:.3f} times "
            "as many per token as the target",
            soft_wrap=True,
            highlight=False,
        )
        return draft


@dataclass(frozen=True)
class Measuring:
    """How acceptance is measured on held-out prompts.

    Attributes:
        temperatures: at which.
        prompts: most held-out prompts to use.
        tokens: most tokens of their answers.
        num_speculative_tokens: γ of the speculative decoding.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int = 16
    tokens: int = 128
    num_speculative_tokens: int = 4


@dataclass(frozen=True)
class Distillation:
    """A run: what to distil, from what, and how.

    Attributes:
        target: a folder, hub id, GGUF file, ``embedded``, or a model in memory.
        out: folder of the run.
        data: what to train on.
        start: what the draft starts from.
        settings: of the training loop; its identity is completed by the run.
        divergence: one of ``LOSSES``; ``cross-entropy`` trains on the tokens alone, as a baseline.
        beta: of Jensen-Shannon.
        temperature: of decoding, at which the distributions are compared; above zero.
        top_k: tokens whose probabilities are cached at each position; 0 caches none and runs the
            target in each step. None takes 64, and 0 for reverse KL, which is small where the draft
            has all of its mass in the tail (``cells.py``).
        rows: packed rows of a step.
        length: tokens of a row.
        batch_size: prompts that are decoded at the same time.
        measuring: of the acceptance.
        cache: folder of answers and probabilities, which runs may share; None for ``out/cache``.
        compile: how the target is compiled for its answers: ``off``, ``auto`` or ``max``, as
            :func:`outrider.load` does. Unless it is ``off``, the divergence is compiled, too.
        device: of both models.
        dtype: of the target; None takes bfloat16 where the hardware computes in it.
        seed: of the prompts, answers, order and initial weights.
    """

    target: str | Path | HFModel
    out: Path
    data: Data
    start: Start
    settings: Settings
    divergence: str = "forward-kl"
    beta: float = 0.5
    temperature: float = 1.0
    top_k: int | None = None
    rows: int = 8
    length: int = 512
    batch_size: int = 32
    measuring: Measuring = Measuring()
    cache: Path | None = None
    compile: str = "off"
    device: str = "auto"
    dtype: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.divergence not in LOSSES:
            raise InvalidParameterError(
                f"divergence={self.divergence!r}: must be one of {', '.join(LOSSES)}"
            )
        if not self.temperature > 0:
            raise InvalidParameterError(
                f"temperature={self.temperature}: must be above 0; to decode greedily, train at a "
                "low temperature or at 1"
            )
        if self.top_k is not None and self.top_k < 0:
            raise InvalidParameterError(f"top_k={self.top_k}: must be 0 or greater")
        if self.rows < 1 or self.length < 2:
            raise InvalidParameterError(
                f"{self.rows} rows of {self.length} tokens: needs at least 1 row of 2 tokens"
            )
        if self.beta != 0.5 and self.divergence != "js":
            raise InvalidParameterError(f"beta={self.beta}: only divergence='js' has one")

    @property
    def num_cached(self) -> int:
        """Tokens whose probabilities are cached at each position; 0 for none."""
        if self.top_k is not None:
            return self.top_k
        return 0 if self.divergence == REVERSE_KL else 64

    @property
    def compiles_loss(self) -> bool:
        """Whether the divergence is compiled, which takes a C++ compiler on a CPU."""
        return self.compile != "off" and find_compiler() is not None

    @property
    def answering(self) -> Answering:
        """How prompts are answered for training."""
        temperatures = self.data.answer_temperatures or (self.temperature,)
        return Answering(temperatures, self.data.answer_tokens, self.length, self.seed)

    @property
    def measured_answers(self) -> Answering:
        """How held-out prompts are answered for the measurement."""
        return Answering(self.measuring.temperatures, self.measuring.tokens, self.length, self.seed)

    @property
    def identity(self) -> dict[str, object]:
        """What a resumed run must share. The learning rate may change."""
        return {
            "data": str(self.data.mixture),
            "divergence": self.divergence,
            "beta": self.beta,
            "temperature": self.temperature,
            "top-k": self.num_cached,
            "rows": self.rows,
            "length": self.length,
            "seed": self.seed,
            "answers": str(self.answering),
            "refresh": f"{self.data.refresh_prompts} prompts every {self.data.refresh_every} steps",
        }
