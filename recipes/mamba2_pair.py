"""Trains a small Mamba-2 and a draft model for it, and measures what drafting is worth.

    python -m recipes.mamba2_pair --out DIR

Target and draft model read the corpus of the embedded pair (``recipes/embedded_pair.py``). The
target learns by cross-entropy; the draft model, one Mamba-2 layer that begins with the target's
embeddings, by forward KL to the target. The last stage generates from held-out files, plain and
with the draft model, and writes DIR/measured.json: tokens per second, their ratio and the
acceptance.

All hyperparameters are in this file. Without the kernels of ``mamba_ssm`` the time and memory of a
step grow with the width of a chunk of the scan times the state, so both are small here; a step of
the target takes two seconds on a core of a server, and the run an hour. Stages whose result exists
are skipped, and training resumes from its checkpoints, so the command can be repeated after any
interruption.
``--smoke`` runs all stages with a few steps of tiny models on the sources of pip.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedTokenizerFast

import outrider
from outrider import Sampling
from outrider.lab.metadata import run_metadata
from outrider.train.corpus import collect
from outrider.train.data import Batches, open_tokens, validation_rows, write_tokens
from outrider.train.distill.objective import distillation
from outrider.train.export import export, load_weights
from outrider.train.loop import Interrupted, Settings, train
from outrider.train.losses import Objective, language_modelling
from outrider.train.models import num_parameters
from outrider.train.optim import Schedule
from outrider.train.tokenizer import train_tokenizer
from recipes import embedded_pair

SEED = 40
PROMPT_TOKENS, NEW_TOKENS = 64, 128


@dataclass(frozen=True)
class Shape:
    """The sizes of a Mamba-2; embeddings and output head are tied.

    Attributes:
        vocab_size: tokens.
        hidden_size: width; the mixers are twice as wide.
        num_hidden_layers: mixers.
        state_size: numbers of the state per channel.
        head_dim: channels of a head.
        chunk_size: most tokens that the scan takes at once.
    """

    vocab_size: int
    hidden_size: int = 256
    num_hidden_layers: int = 12
    state_size: int = 16
    head_dim: int = 64
    chunk_size: int = 8

    def build(self, seed: int) -> Mamba2ForCausalLM:
        """A freshly initialised float32 model."""
        torch.manual_seed(seed)
        sizes = asdict(self) | {"num_heads": 2 * self.hidden_size // self.head_dim}
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
        config = Mamba2Config(**sizes, **tokens, n_groups=1, tie_word_embeddings=True)
        return Mamba2ForCausalLM(config).float()


@dataclass(frozen=True)
class Plan:
    """What is trained, and on how much.

    Attributes:
        target: the target's sizes.
        draft: the draft model's.
        target_schedule: of the target's training.
        draft_schedule: of the draft model's.
        packages: whose sources are the corpus.
        package_bytes: most bytes of each.
        rows: rows of a batch.
        row_tokens: tokens of a row.
        prompts: held-out prompts that the pair is measured on.
    """

    target: Shape
    draft: Shape
    target_schedule: Schedule
    draft_schedule: Schedule
    packages: tuple[str, ...] = embedded_pair.PACKAGES
    package_bytes: int = embedded_pair.MAX_PACKAGE_BYTES
    rows: int = 8
    row_tokens: int = 256
    prompts: int = 32


FULL = Plan(
    Shape(embedded_pair.VOCAB_SIZE),
    Shape(embedded_pair.VOCAB_SIZE, num_hidden_layers=1),
    Schedule(learning_rate=4e-3, steps=1000, warmup_steps=60, decay_steps=300),
    Schedule(learning_rate=4e-3, steps=800, warmup_steps=20, decay_steps=300),
)
SMOKE = replace(
    FULL,
    target=Shape(512, hidden_size=32, num_hidden_layers=2, state_size=8, head_dim=16),
    draft=Shape(512, hidden_size=32, num_hidden_layers=1, state_size=8, head_dim=16),
    target_schedule=Schedule(learning_rate=4e-3, steps=4),
    draft_schedule=Schedule(learning_rate=4e-3, steps=4),
    packages=("pip",),
    package_bytes=400_000,
    rows=2,
    row_tokens=64,
    prompts=2,
)


def build_corpus(plan: Plan, folder: Path, console: Console) -> PreTrainedTokenizerFast:
    """Collect the corpus, train the tokenizer on its training split, and write the tokens."""
    if not (folder / "manifest.json").exists():
        sources = collect(plan.packages, plan.package_bytes)
        texts = [d.text for source in sources for d in source.documents if not d.held_out]
        tokenizer = train_tokenizer(texts, plan.target.vocab_size)
        tokenizer.save_pretrained(folder / "tokenizer")
        console.print(json.dumps(write_tokens(sources, tokenizer, folder)["splits"]))
    return PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")


def train_stage(
    title: str,
    model: Mamba2ForCausalLM,
    objective: Objective,
    schedule: Schedule,
    plan: Plan,
    out: Path,
) -> None:
    """Train one model to the end of its schedule, from its checkpoint if there is one."""
    tokens, held_out = (open_tokens(out / "corpus" / f"{split}.bin") for split in ("train", "val"))
    settings = Settings(
        schedule,
        checkpoint_every=50,
        validate_every=200,
        identity={
            "learning rate": schedule.learning_rate,
            "seed": SEED,
            "parameters": num_parameters(model),
        },
    )
    train(
        title,
        model,
        objective,
        Batches(tokens, plan.rows, plan.row_tokens, SEED),
        settings,
        out / title,
        validation_rows(held_out, plan.row_tokens, max_rows=64),
    )


def train_pair(plan: Plan, out: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train and export both models."""
    target, draft = plan.target.build(SEED), plan.draft.build(SEED + 1)
    train_stage("target", target, language_modelling(target), plan.target_schedule, plan, out)
    load_weights(target, out / "target")
    if plan.target.hidden_size == plan.draft.hidden_size:
        with torch.no_grad():
            draft.backbone.embeddings.weight.copy_(target.backbone.embeddings.weight)
    objective = distillation(draft, target)
    train_stage("draft", draft, objective, plan.draft_schedule, plan, out)
    load_weights(draft, out / "draft")
    for title, model in (("target", target), ("draft", draft)):
        card = f"# {title}\n\nMamba-2, {num_parameters(model):,} parameters"
        export(model, tokenizer, out / title / "model", card + " (`recipes.mamba2_pair`).\n")


def measure(plan: Plan, out: Path) -> dict[str, float]:
    """Generates from held-out files, plain and with the draft model."""
    tokens = open_tokens(out / "corpus" / "val.bin")
    prompts = validation_rows(tokens, PROMPT_TOKENS, plan.prompts)[:, :-1].tolist()
    sampling = Sampling(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    folders = [str(out / title / "model") for title in ("target", "draft")]
    found: dict[str, float] = {}
    for method in ("plain", "speculative"):
        draft = folders[1] if method == "speculative" else None
        engine = outrider.load(folders[0], draft, method, "fixed", dtype="float32", device="cpu")
        engine.generate(prompts[:1], sampling)
        start = time.perf_counter()
        results = [engine.generate([prompt], sampling) for prompt in prompts]
        num = sum(len(each[0].token_ids) for each in results)
        found[f"{method} tokens per second"] = num / (time.perf_counter() - start)
        if draft is not None:
            stats = [each.stats for each in results]
            drafted = sum(each.drafted for each in stats)
            found["acceptance rate"] = sum(each.accepted for each in stats) / max(drafted, 1)
    plain, speculative = (
        found[f"{method} tokens per second"] for method in ("plain", "speculative")
    )
    return found | {"speed-up": speculative / plain}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small Mamba-2 and its draft model.")
    parser.add_argument("--out", type=Path, required=True, help="folder of corpus and checkpoints")
    parser.add_argument("--smoke", action="store_true", help="a few steps of tiny models")
    parsed = parser.parse_args(arguments)
    out, plan, console = parsed.out, SMOKE if parsed.smoke else FULL, Console(stderr=True)
    try:
        train_pair(plan, out, build_corpus(plan, out / "corpus", console))
    except Interrupted as stop:
        console.print(f"stopped after step {stop}; run the same command again to continue")
        raise SystemExit(130) from None
    found = measure(plan, out)
    about = run_metadata(command="python -m recipes.mamba2_pair --out DIR", temperature=0)
    (out / "measured.json").write_text(json.dumps({"about": about} | found, indent=1) + "\n")
    console.print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
