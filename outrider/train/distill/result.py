"""The folders of a finished draft: weights, tokenizer, model card; written so that a kill at any
moment leaves a complete folder."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.runtime import HFModel
from outrider.runtime.hf.load import quiet
from outrider.train.disk import require_space, tensor_bytes
from outrider.train.distill.measure import Acceptance, Measurement
from outrider.train.export import in_bfloat16

MEASUREMENTS = "measurements.json"
BEST, LAST = "best", "last"


def as_saved(draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> HFModel:
    """A copy of a draft in bfloat16, in which it is saved, ready to run."""
    return HFModel(in_bfloat16(copy.deepcopy(draft)).eval(), tokenizer, "draft")


def save(
    draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str
) -> None:
    """Writes a model folder, replacing an earlier one as a whole.

    Raises:
        DiskFullError: no room; the earlier one is intact.
    """
    fresh, old = folder.with_name(f"{folder.name}.partial"), folder.with_name(f"{folder.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    size = tensor_bytes(draft.state_dict())
    require_space(folder.parent, size, "the draft", "free some")
    with quiet():
        draft.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    (fresh / "README.md").write_text(card, encoding="utf-8")
    for file in fresh.iterdir():
        file.chmod(0o644)  # safetensors makes files that only their owner can read
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Puts a folder back that was being replaced when the process was killed."""
    old = folder.with_name(f"{folder.name}.old")
    if old.exists() and not folder.exists():
        os.replace(old, folder)


class History:
    """The measurements of a run, on disk, by step.

    A measurement that is repeated after an interruption replaces the earlier one.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / MEASUREMENTS
        self.measurements: list[Measurement] = []
        if self.path.exists():
            for entry in json.loads(self.path.read_text()):
                at = (
                    Acceptance(
                        **{**each, "sums": tuple(each["sums"]), "counts": tuple(each["counts"])}
                    )
                    for each in entry["at"]
                )
                self.measurements.append(Measurement(entry["step"], entry["tokens"], tuple(at)))

    def before(self, step: int) -> list[Measurement]:
        return [each for each in self.measurements if each.step < step]

    def is_best(self, measurement: Measurement) -> bool:
        """Whether a measurement is above all those of earlier steps."""
        earlier = self.before(measurement.step)
        return not earlier or measurement.score > max(each.score for each in earlier)

    def add(self, measurement: Measurement) -> None:
        """Adds a measurement, and forgets those of later steps, which a resumed run repeats."""
        self.measurements = [*self.before(measurement.step), measurement]
        partial = self.path.with_suffix(".partial")
        partial.write_text(
            json.dumps([asdict(each) for each in self.measurements], indent=1) + "\n"
        )
        os.replace(partial, self.path)

    def best(self) -> Measurement:
        """The first of those with the highest score."""
        return max(self.measurements, key=lambda each: (each.score, -each.step))


def card(title: str, facts: Mapping[str, str], measurement: Measurement, command: str) -> str:
    """The README.md of a draft's folder.

    Args:
        title: heading.
        facts: name and value of each row of the table.
        measurement: of the weights in the folder.
        command: that trains such a draft.
    """
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, draft-model, distillation]
---

# {title}

A draft model for speculative decoding, distilled from its target by Outrider. It loads as
`--draft` of Outrider and as the `assistant_model` of `transformers`.

| | |
| --- | --- |
{rows}

## Acceptance

On held-out prompts, which were not trained on. α is the mean of Σ min(p, q) along the target's own
answers at that temperature; the acceptance length is emitted tokens per forward pass of the
target, bonus included (plain decoding has 1).

{acceptance_table(measurement.at)}

## Train it again

```
{command}
```
"""


def acceptance_table(at: Sequence[Acceptance]) -> str:
    """α and acceptance length by temperature, as Markdown."""
    lines = [
        "| temperature | α | acceptance length | acceptance rate | positions |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {each.temperature:g} | {each.alpha:.3f} | {each.acceptance_length:.2f} "
        f"| {each.acceptance_rate:.3f} | {sum(each.counts):,} |"
        for each in at
    ]
    return "\n".join(lines)
