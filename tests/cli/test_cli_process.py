"""The command line in its own process: Ctrl-C, pipes, output of libraries."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.__main__ import replace_closed_streams

PROMPT = "def f3(x):"


def command(pair: tuple[Path, Path], *arguments: object) -> list[str]:
    target, draft = pair
    models = ("--target", target, "--draft", draft, "--dtype", "float32", "--device", "cpu")
    program = "from outrider.cli import main; main()"
    return [sys.executable, "-c", program, "generate", PROMPT, *map(str, (*models, *arguments))]


# A background job starts with SIGINT ignored.
HEED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **changes}


def test_only_output_and_summary_appear_even_on_an_ascii_terminal(pair: tuple[Path, Path]) -> None:
    """Characters that the terminal cannot show are escaped; libraries print nothing."""
    done = subprocess.run(
        command(pair, "--max-new-tokens", 40),
        capture_output=True,
        env=environment(PYTHONIOENCODING="ascii"),
    )
    assert done.returncode == 0
    assert done.stdout
    assert done.stdout.isascii()
    assert done.stderr.startswith(b"40 tokens, ")
    assert done.stderr.count(b"\n") == 1


def test_standard_streams_that_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    replace_closed_streams()
    assert not sys.stdin.buffer.read()
    assert not sys.stdin.isatty()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
        stream.write("γ\n")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_keeps_the_output_so_far(pair: tuple[Path, Path], as_json: bool) -> None:
    """The signal arrives after the output of some rounds."""
    slow = (
        "import os\n"
        "from outrider.cli.quiet import silence; silence()\n"
        "import outrider.engine as e\n"
        "run = e.Engine.run\n"
        "def interrupted(self, prompt, sampling, **options):\n"
        "    for number, pair in enumerate(run(self, prompt, sampling, **options)):\n"
        "        yield pair\n"
        "        if number == 5: os.kill(os.getpid(), signal.SIGINT)\n"
        "e.Engine.run = interrupted\n"
        "from outrider.cli import main; main()"
    )
    arguments = command(pair, "--max-new-tokens", 200, *["--json"] * as_json)
    arguments[2] = HEED + slow
    done = subprocess.run(arguments, capture_output=True, env=environment())
    assert done.returncode == 130
    assert b"Traceback" not in done.stderr
    if as_json:
        document = json.loads(done.stdout)
        assert document["finish_reason"] == "cancelled"
        assert len(document["token_ids"]) >= 6
    else:
        assert done.stdout
        assert b"end: cancelled\n" in done.stderr
        assert done.stderr.count(b"\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_before_the_first_token_is_one_line(pair: tuple[Path, Path]) -> None:
    arguments = command(pair)
    arguments[2] = HEED + (
        "import os, outrider.cli.generate as g\n"
        "def wait(*a, **k): os.kill(os.getpid(), signal.SIGINT)\n"
        "g.open_engine = wait\n"
        "from outrider.cli import main; main()"
    )
    done = subprocess.run(arguments, capture_output=True, env=environment())
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")


def test_ctrl_c_while_the_command_line_is_imported_is_one_line() -> None:
    program = (
        "import sys\n"
        "from outrider.__main__ import main\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'outrider.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")


def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "outrider", "--version"], capture_output=True)
    assert (done.returncode, done.stdout[:9]) == (0, b"outrider ")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes")
@pytest.mark.parametrize("options", [["--trace"], ["--json"]])
def test_a_closed_pipe_is_silent(pair: tuple[Path, Path], options: list[str]) -> None:
    process = subprocess.Popen(
        command(pair, "--max-new-tokens", 30, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read().replace(b"trace: ", b"").count(b"\n") <= len(options)
    process.stderr.close()
    assert process.wait() != 2
