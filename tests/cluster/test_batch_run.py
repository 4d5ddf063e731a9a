"""A whole file: every line once, in order, also after interruptions; and what is refused."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from outrider import Sampling
from outrider.cluster.batch.answer import Answers, LoadedModels
from outrider.cluster.batch.blocks import Block, Input
from outrider.cluster.batch.lines import Asking
from outrider.cluster.batch.parts import Parts
from outrider.cluster.batch.run import Summary, run_batch
from outrider.core.errors import InvalidParameterError, OutriderError
from outrider.lab.model_files import fingerprint

NUM_LINES, BLOCK_LINES = 23, 4
Tasks = Iterable[tuple[int, Block]]
Found = Iterator[tuple[int, Answers]]


def echo(block: Block) -> Answers:
    """Repeats lines with their numbers; the line ``bad`` has an error."""
    lines = [f"{number} {line.decode()}\n" for number, line in block.numbered]
    errors = tuple((number, "is bad") for number, line in block.numbered if line == b"bad")
    return Answers("".join(lines), errors, len(lines))


def backwards(tasks: Tasks) -> Found:
    for number, block in reversed(list(tasks)):
        yield number, echo(block)


def stopping(after: int) -> "object":
    """Answers so many blocks, backwards, and then fails."""

    def answer(tasks: Tasks) -> Found:
        for count, found in enumerate(backwards(tasks)):
            if count == after:
                raise OutriderError("the power is out")
            yield found

    return answer


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = ["bad" if number == 6 else f"line{number}" for number in range(1, NUM_LINES + 1)]
    path.write_text("\n".join(lines))
    return path


def expected(prompts: Path) -> str:
    lines = prompts.read_text().split("\n")
    return "".join(f"{number} {line}\n" for number, line in enumerate(lines, 1))


def run(prompts: Path, answer: object = backwards, **settings: object) -> Summary:
    contents = {"seed": settings.pop("seed", 0)}
    out = prompts.with_name("out.jsonl")
    settings.setdefault("block_lines", BLOCK_LINES)
    return run_batch(prompts, out, answer, contents, **settings)  # type: ignore[arg-type]


def test_every_line_once_in_order(prompts: Path) -> None:
    told: list[tuple[int, int]] = []
    summary = run(prompts, report=lambda done, total: told.append((done, total)))
    assert prompts.with_name("out.jsonl").read_text() == expected(prompts)
    assert summary == Summary(NUM_LINES, 0, NUM_LINES, 1, ((6, "is bad"),))
    assert told[0] == (0, NUM_LINES)
    assert told[-1] == (NUM_LINES, NUM_LINES)
    assert sorted(path.name for path in prompts.parent.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_an_interrupted_run_goes_on_with_what_is_left(prompts: Path) -> None:
    out = prompts.with_name("out.jsonl")
    with pytest.raises(OutriderError, match="power"):
        run(prompts, stopping(after=2))
    assert not out.exists()
    asked: list[int] = []

    def counting(tasks: Tasks) -> Found:
        for number, block in tasks:
            asked.append(number)
            yield number, echo(block)

    summary = run(prompts, counting)
    assert out.read_text() == expected(prompts)
    assert asked == [0, 1, 2, 3], "blocks 4 and 5 were finished"
    assert summary.num_resumed == 7
    assert summary.num_errors == 1, "errors of the interrupted run are reported, too"


def test_an_interrupted_write_leaves_no_block(prompts: Path) -> None:
    """A file that was being written when the power went is no finished block."""
    with pytest.raises(OutriderError, match="power"):
        run(prompts, stopping(after=1))
    parts = prompts.with_name("out.jsonl.parts")
    (parts / "00000002.partial").write_text("half a li")
    run(prompts)
    assert prompts.with_name("out.jsonl").read_text() == expected(prompts)


def test_other_options_or_prompts_do_not_mix(prompts: Path) -> None:
    with pytest.raises(OutriderError, match="power"):
        run(prompts, stopping(after=1))
    with pytest.raises(InvalidParameterError, match=r"other seed \(0, and now 1\)"):
        run(prompts, seed=1)
    with pytest.raises(InvalidParameterError, match="other block_lines"):
        run(prompts, block_lines=5)
    prompts.write_text(prompts.read_text() + "\nmore")
    with pytest.raises(InvalidParameterError, match="other prompts"):
        run(prompts)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_models_that_were_trained_meanwhile_do_not_mix(
    prompts: Path, tmp_path: Path, role: str
) -> None:
    """The message names the model, and the fingerprints of then and now."""
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    names = {each: str(tmp_path / each) for each in ("target", "draft")}
    loaded = LoadedModels(names, Asking(Sampling()))
    before = fingerprint(names[role], role)
    out = prompts.with_name("out.jsonl")
    with pytest.raises(OutriderError, match="power"):
        run_batch(prompts, out, stopping(after=1), loaded.contents, block_lines=BLOCK_LINES)
    (tmp_path / role / "model.safetensors").write_bytes(b"trained")
    after = fingerprint(names[role], role)
    problem = f"other weights of the {role} '{names[role]}' ('{before}', and now '{after}')"
    with pytest.raises(InvalidParameterError, match=re.escape(problem)):
        run_batch(prompts, out, backwards, loaded.contents, block_lines=BLOCK_LINES)
    (tmp_path / role / "model.safetensors").write_bytes(b"weights")
    run_batch(prompts, out, backwards, loaded.contents, block_lines=BLOCK_LINES)
    assert out.read_text() == expected(prompts)


def test_another_draft_is_named_before_its_weights(prompts: Path) -> None:
    out = prompts.with_name("out.jsonl")
    first, second = (
        LoadedModels({"target": "someone/big", "draft": f"someone/{name}"}, Asking(Sampling()))
        for name in ("small", "other")
    )
    with pytest.raises(OutriderError, match="power"):
        run_batch(prompts, out, stopping(after=1), first.contents, block_lines=BLOCK_LINES)
    problem = r"other draft \('someone/small', and now 'someone/other'\)"
    with pytest.raises(InvalidParameterError, match=problem):
        run_batch(prompts, out, backwards, second.contents, block_lines=BLOCK_LINES)


def test_an_output_is_not_overwritten_unasked(prompts: Path) -> None:
    out = prompts.with_name("out.jsonl")
    out.write_text("precious")
    with pytest.raises(InvalidParameterError, match="--overwrite"):
        run(prompts)
    assert out.read_text() == "precious"
    run(prompts, overwrite=True)
    assert out.read_text() == expected(prompts)


def test_the_prompts_are_not_replaced(prompts: Path) -> None:
    before = prompts.read_text()
    link = prompts.with_name("link.jsonl")
    link.symlink_to(prompts)
    for out in (prompts, link):
        with pytest.raises(InvalidParameterError, match="is the file of the prompts"):
            run_batch(prompts, out, backwards, {}, overwrite=True)
    assert prompts.read_text() == before


def test_an_output_that_is_a_folder(prompts: Path) -> None:
    for folder in (prompts.parent, Path(), Path("/")):
        with pytest.raises(InvalidParameterError, match="is a folder"):
            run_batch(prompts, folder, backwards, {}, overwrite=True)


def test_prompts_from_a_pipe() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(InvalidParameterError, match="is a pipe"):
        Input.scan(Path(f"/dev/fd/{reading}"), 1)
    os.close(reading)


def test_blocks_that_an_interrupted_removal_left_are_not_used(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power goes while the folder of the first run is being removed; the options of the second
    run are others."""

    def interrupted(folder: Path, ignore_errors: bool = False) -> None:
        if folder.exists():
            (folder / "batch.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(prompts)
    assert prompts.with_name("out.jsonl").read_text() == expected(prompts)
    with pytest.raises(InvalidParameterError, match="--overwrite"):
        run(prompts, seed=1)
    summary = run(prompts, seed=1, overwrite=True)
    assert summary.num_resumed == 0
    assert sorted(path.name for path in prompts.parent.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_two_runs_do_not_write_the_same_output(prompts: Path) -> None:
    out = prompts.with_name("out.jsonl")
    with (
        Parts(out, {}).opened(overwrite=False),
        pytest.raises(InvalidParameterError, match="another run writes"),
    ):
        run(prompts)


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("block_lines", [1, 2, 3, 100])
def test_blocks_cover_the_file(tmp_path: Path, block_lines: int, end: str) -> None:
    path = tmp_path / "lines"
    lines = [b"one", b"two\xe2\x80\xa8two", b"", b"four\r", b"five"]  # U+2028 ends no line
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines) + end.encode())
    found = Input.scan(path, block_lines)
    numbered = [each for number in range(len(found)) for each in found.read(number).numbered]
    assert numbered == list(enumerate([line.rstrip(b"\r") for line in lines], 1))
    assert sum(found.size(number) for number in range(len(found))) == found.num_lines == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (b"\x1f\x8b\x08", "compressed"), (None, "cannot read")],
)
def test_files_that_are_none(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidParameterError, match=message):
        run(path)


def test_answers_are_ground_truth_for_distillation(tmp_path: Path) -> None:
    """The lines of output are lines that ``outrider distill`` reads."""
    from tiny_servers import tiny_engine

    from outrider.cluster.batch.answer import BlockAnswerer
    from outrider.train.distill.prompts import Reader

    engine = tiny_engine()
    lines = [{"prompt": "ab"}, {"messages": [{"role": "user", "content": "cd"}]}]
    block = Block(0, 1, tuple(json.dumps(line).encode() for line in lines))
    path = tmp_path / "answers.jsonl"
    answers = BlockAnswerer(engine, Asking(Sampling(max_new_tokens=6)))(block)
    path.write_text(answers.text)
    assert engine.target.tokenizer is not None
    prompts = Reader(engine.target.tokenizer, "tiny").read(path)
    assert len(prompts) == 2
    assert all(prompt.answer for prompt in prompts)
