"""What distillation gains: the split of the answers, equal tokens, and a small run."""

import json
from pathlib import Path

import pytest
from tiny_distillation import save_target

from outrider.train.distill.measure import Acceptance
from outrider.train.distill.run import load_target
from outrider.train.distill.shape import Shape
from recipes import distill_gain
from recipes.distill_gain import BASELINE, CELLS, compared, main, prepare, samples_of, steps_over

PROMPTS = [f"def f{number}(x):" for number in range(40)]


def chat(prompt: str, answer: str, temperature: float = 1.0, system: str = "") -> dict[str, object]:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "temperature": temperature}


def files(folder: Path) -> tuple[Path, Path]:
    """Short answers of others, and long ones of the target, which also answered other prompts."""
    human, own = folder / "human.jsonl", folder / "own.jsonl"
    human.write_text(
        "".join(json.dumps({"prompt": p, "answer": "return 1"}) + "\n" for p in PROMPTS)
    )
    chats = [chat(p, "    return x + 1, x + 2, x + 3") for p in PROMPTS]
    chats += [
        chat(PROMPTS[0], "greedy", 0.0),
        chat("another", "x"),
        chat(PROMPTS[1], "y", 1.0, "s"),
    ]
    own.write_text("".join(json.dumps(each) + "\n" for each in chats))
    return human, own


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def users(chats: list[dict[str, object]]) -> set[str]:
    return {each["messages"][0]["content"] for each in chats}  # type: ignore[index]


def test_both_kinds_have_the_same_prompts_and_none_that_is_held_out(tmp_path: Path) -> None:
    found = prepare(*files(tmp_path), tmp_path)
    own, held_out = lines(found.train["target"]), lines(found.held_out)
    human = lines(found.train["ground-truth"])
    assert {each["prompt"] for each in human} == users(own)
    assert not users(own) & users(held_out)
    assert users(own) | users(held_out) == set(PROMPTS)
    assert 4 <= len(held_out) <= 16
    assert all(each["temperature"] == 1.0 for each in held_out)


def test_files_without_a_prompt_in_common(tmp_path: Path) -> None:
    human, own = files(tmp_path)
    own.write_text(json.dumps(chat("another", "x")) + "\n")
    with pytest.raises(SystemExit, match=r"have 0 prompts in common.*same prompts"):
        prepare(human, own, tmp_path)


def test_cells_train_on_the_same_number_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short answers take more steps."""
    monkeypatch.setattr(distill_gain, "ROWS", 1)
    target = load_target(save_target(tmp_path / "target"), "cpu", "float32")
    found = prepare(*files(tmp_path), tmp_path)
    steps = {kind: steps_over(file, target, 4000) for kind, file in found.train.items()}
    assert steps["ground-truth"] > 1.3 * steps["target"] > 4


def test_a_gain_is_paired() -> None:
    base = Acceptance(1.0, 0.5, 0, 0, (1.0, 9.0) * 20, (10, 10) * 20)
    ours = Acceptance(1.0, 0.6, 0, 0, (2.0, 10.0) * 20, (10, 10) * 20)
    found = compared(ours, base)
    assert found == pytest.approx({"gain": 0.1, "gain_low": 0.1, "gain_high": 0.1})


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS", 1), ("LENGTH", 64), ("SHAPE", Shape(1, 16))):
        monkeypatch.setattr(distill_gain, name, value)
    human, own = files(tmp_path)
    target, out = save_target(tmp_path / "target"), tmp_path / "out"
    files_ = f"--ground-truth={human} --answers={own} --out={out} --target={target}"
    main(f"{files_} --dtype=float32 --tokens=200 --cells=2 --name=toy".split())
    document = json.loads((out / "distill_gain.json").read_text())
    rows = document["cells"]
    assert [(row["loss"], row["data"]) for row in rows] == [BASELINE, CELLS[1]]
    assert rows[0]["gain"] == 0
    assert all(row["low"] <= row["alpha"] <= row["high"] for row in rows)
    assert all(100 < row["tokens"] < 400 for row in rows)
    assert samples_of(out / "held_out.jsonl", load_target(target, "cpu"))[1]
    table = (out / "distill_gain.md").read_text()
    assert f"| forward-kl | target | {rows[1]['steps']} |" in table
