"""``outrider distill``: a run from the command line, its result, and bad input on one line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]
PROMPTS = [f"def f{i}(x):" for i in range(12)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


@pytest.fixture
def distill(run: Run, pair: tuple[Path, Path], prompts: Path, tmp_path: Path) -> Run:
    """Runs two steps on the tiny target."""

    def call(*arguments: object) -> Result:
        small = "--steps 2 --rows 1 --length 48 --answer-tokens 8 --top-k 8 --measure-tokens 6"
        fixed = ("--target", pair[0], "--prompts", prompts, "--out", tmp_path / "out")
        return run("distill", *fixed, *small.split(), "--device", "cpu", *arguments)

    return call


def test_a_draft_is_trained_and_used(
    distill: Run, run: Run, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    done = distill("--from-layers", "0,1", "--no-tensorboard", "--data", "mixture")
    assert done.exit_code == 0, done.stderr
    assert "layers 0, 1 of the target's 2" in done.stderr
    assert "before training: alpha at T=0" in done.stderr
    best = tmp_path / "out" / "best"
    used = run("generate", "def f", "--target", pair[0], "--draft", best, "--max-new-tokens", 8)
    assert used.exit_code == 0, used.stderr
    again = distill("--from-layers", "0,1", "--no-tensorboard", "--data", "mixture")
    assert again.exit_code == 0, again.stderr
    assert "resuming after step 2" in again.stderr


def test_the_chosen_shape_is_said(distill: Run) -> None:
    done = distill("--cost-ratio", "0.7", "--no-tensorboard")
    assert done.exit_code == 0, done.stderr
    assert "the draft: a new model of" in done.stderr
    assert "times as many per token as the target" in done.stderr


def test_fresh_starts_over(distill: Run) -> None:
    assert distill("--from-layers", "1", "--no-tensorboard").exit_code == 0
    other = ("--from-layers", "1", "--no-tensorboard", "--divergence", "tv")
    refused = distill(*other)
    assert refused.exit_code == 2
    assert "holds a run with divergence 'forward-kl', not 'tv'" in refused.stderr
    assert distill(*other, "--fresh").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--divergence", "x"), "--divergence x: must be one of forward-kl, reverse-kl, js"),
        (("--data", "x"), "--data x: must be one of ground-truth"),
        (("--dtype", "float16"), "--dtype float16: must be bfloat16 or float32"),
        (("--share", "draft"), "--share draft: must be such as target=0.7"),
        (("--share", "draft=1"), "only --data mixture has shares"),
        (("--data", "mixture", "--share", "draft=0.5"), "sum to 0.5"),
        (("--layers", "2"), "needs both --layers and --width"),
        (("--from-layers", "a,b"), "--from-layers a,b: must be a number of layers"),
        (("--from-layers", "0,7"), "each from 0 to 1"),
        (("--from-layers", "0"), "0 layers of the target: it has 2, so from 1 to 2"),
        (("--from-layers", "9"), "9 layers of the target: it has 2"),
        (("--from-layers", "1", "--cost-ratio", "0.5"), "starts from layers and cost_ratio"),
        (("--cost-ratio", "2"), "--cost-ratio 2"),
        (("--temperature", "0"), "--temperature 0"),
        (("--lr", "0"), "learning rate is 0"),
        (("--self-prompts", "4"), "has no chat template, so it cannot write prompts"),
        (("--prompts", "nothing.txt"), "no such file or folder: nothing.txt"),
    ],
)
def test_bad_input(distill: Run, arguments: tuple[str, ...], message: str) -> None:
    done = distill(*arguments)
    assert done.exit_code == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert message in done.stderr.strip().splitlines()[-1]


def test_prompts_without_answers_are_no_ground_truth(distill: Run) -> None:
    done = distill("--data", "ground-truth")
    assert done.exit_code == 2
    assert "there is no ground truth; give JSON lines with answers" in done.stderr


def test_no_prompts(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    done = run("distill", "--target", pair[0], "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "no prompts: give a file or folder" in done.stderr
    assert not (tmp_path / "out").exists()


def test_ground_truth_of_a_folder(distill: Run, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(
            "".join(f"def f{number}{line}(x):\n    return x\n" for line in range(9))
        )
    done = distill("--prompts", folder, "--data", "ground-truth")
    assert done.exit_code == 0, done.stderr
    assert list((tmp_path / "out" / "tensorboard").glob("events*"))
