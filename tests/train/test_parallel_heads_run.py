"""Whole runs of `outrider train-head` with block, P-EAGLE and Medusa heads: they resume bit for
bit, and what they write loads by its folder alone."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import byte_tokenizer, greedy, tiny_module

import outrider
from outrider.drafters.heads.formats.block import load_block
from outrider.runtime import load_model
from outrider.train.heads.batches import StateBatches
from outrider.train.heads.kind import Ground
from outrider.train.heads.kinds import find_kind
from outrider.train.heads.run import HeadRun, run_head
from outrider.train.heads.samples import held_out, read_samples
from outrider.train.heads.states import compute_states
from outrider.train.optim import Schedule

OPTIONS: dict[str, dict[str, object]] = {
    "dflash": {"draft_vocab_size": 60, "block_size": 4, "num_layers": 1, "num_anchors": 3},
    "dspark": {"draft_vocab_size": 60, "block_size": 3, "markov_rank": 4, "num_anchors": 3},
    "peagle": {"draft_vocab_size": 60, "num_depths": 3, "num_anchors": 3},
    "medusa": {"draft_vocab_size": 60, "num_heads": 2},
}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


class Files(NamedTuple):
    target: Path
    data: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    module = tiny_module(vocab_size=len(tokenizer), num_hidden_layers=4)
    module.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    with open(folder / "data.jsonl", "w") as file:
        for i in range(8):
            messages = [
                {"role": "user", "content": f"print {i}"},
                {"role": "assistant", "content": f"def f{i}(x):\n    return x + {i}"},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return Files(folder / "target", folder / "data.jsonl")


def run(out: Path, files: Files, kind: str, steps: int = 4) -> dict[str, torch.Tensor]:
    """Trains for some steps; the weights in the checkpoint."""
    row = find_kind(kind)
    about = HeadRun(
        row,
        files.target,
        files.data,
        OPTIONS[kind],
        num_held_out=2,
        eval_tokens=4,
        dtype="float32",
        cache=out.parent / f"states-{kind}",
    )
    schedule = Schedule(1e-3, steps, 1, 1)
    run_head(out, about, schedule, batch_size=3, seed=0, checkpoint_every=2, evaluate_every=3)
    weights: dict[str, torch.Tensor] = torch.load(out / "checkpoint.pt")["model"]
    return weights


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_killed_run_resumes_and_its_head_loads(
    kind: str, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies in the step after a checkpoint."""
    whole = run(tmp_path / "whole", files, kind)
    batch_of, calls = StateBatches.__call__, iter(range(3))

    def dying(self: StateBatches, step: int) -> Any:
        if next(calls, None) is None:
            raise MemoryError
        return batch_of(self, step)

    with monkeypatch.context() as during:
        during.setattr(StateBatches, "__call__", dying)
        with pytest.raises(MemoryError):
            run(tmp_path / "killed", files, kind)
    found = run(tmp_path / "killed", files, kind)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    best = tmp_path / "whole" / "best"
    assert json.loads((best / "measured.json").read_text())["score"] >= 1
    engine = outrider.load(str(files.target), str(best), dtype="float32")
    assert engine.method.name == kind
    plain = outrider.load(str(files.target), method="plain", dtype="float32")
    one, other = (each.generate(["def f", "print"], greedy(12)) for each in (engine, plain))
    assert [r.token_ids for r in one] == [r.token_ids for r in other]
    assert one.stats.drafted > 0


def confidence(folder: Path) -> torch.Tensor:
    return load_block(folder).network.confidence_head.proj.weight.detach()


def test_the_best_heads_confidence_is_calibrated(files: Files, tmp_path: Path) -> None:
    """Calibrating it again by the samples kept apart changes nothing; the last head's changes."""
    run(tmp_path / "out", files, "dspark")
    target = load_model(files.target, dtype="float32")
    _, probes = held_out(read_samples(files.data, target.tokenizer, 1024), 2)
    row = find_kind("dspark")
    layers = row.layers(target, row.values(OPTIONS["dspark"]))
    states = compute_states(target, probes, layers, tmp_path / "states-dspark")
    assert row.finish is not None
    for folder, changes in (("best", False), ("last", True)):
        before = confidence(tmp_path / "out" / folder)
        ground = Ground(target, torch.zeros(target.num_tokens), 0)
        row.finish(tmp_path / "out" / folder, ground, states)
        after = confidence(tmp_path / "out" / folder)
        assert torch.allclose(before, after, rtol=0.02) != changes
