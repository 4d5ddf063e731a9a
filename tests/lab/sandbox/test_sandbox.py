"""Generated code is contained: by the kernel alone, by the audit hook alone, and by both.

Each attack runs in its own process, under each layer that claims to stop it.
"""

import os
import sys
from pathlib import Path

import pytest

from outrider.lab.sandbox import Limits, Outcome, enforced_by_kernel, landlock, run_program, seccomp
from outrider.lab.sandbox.limits import MiB

LIMITS = Limits(wall_seconds=60, cpu_seconds=30)
BRIEF = Limits(wall_seconds=1, cpu_seconds=30)
LAYERS = {
    "both": {"kernel": True, "hook": True},
    "kernel": {"kernel": True, "hook": False},
    "hook": {"kernel": False, "hook": True},
}
needs_kernel = pytest.mark.skipif(
    not enforced_by_kernel(), reason="the kernel has no Landlock, or seccomp no filter for it"
)
BY_LAYER = [
    pytest.param("both"),
    pytest.param("kernel", marks=needs_kernel),
    pytest.param("hook"),
]


def run(source: str, layer: str = "both", limits: Limits = LIMITS) -> Outcome:
    return run_program(source, limits, **LAYERS[layer])


@pytest.mark.parametrize("layer", BY_LAYER)
def test_ordinary_code_passes(layer: str) -> None:
    """Libraries load, the program has a folder of its own, and a module's namespace."""
    source = """
import collections, datetime, decimal, hashlib, json, math, random, re, tempfile
from dataclasses import dataclass

@dataclass
class Pair:
    first: "int" = 1

with open("notes.txt", "w") as file:
    file.write("x")
with open("notes.txt") as file:
    assert file.read() == "x"
with tempfile.TemporaryFile() as file:
    file.write(b"x")
assert hashlib.md5(b"").hexdigest().startswith("d41d")
assert Pair().first == 1 and __name__ == "program"
"""
    assert run(source, layer) == Outcome("passed")


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError: "),
        ("x = 1\0", ""),  # a SyntaxError, in older Pythons a ValueError
        ("input()", "EOFError: "),
        ("def f(): f()\nf()", "RecursionError: "),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class E(Exception):\n    def __str__(self): raise E\nraise E", "E: "),
    ],
)
def test_code_that_raises_or_leaves_early_has_not_passed(source: str, detail: str) -> None:
    found = run(source)
    assert found.ending == "raised"
    assert found.detail.startswith(detail)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)",
        "import os\nos.closerange(0, 64)\nwhile True: pass",
        "import os\n[os.write(n, b'{\"passed\": true}') for n in range(3, 12) "
        "if not os.set_blocking(n, True)]",
    ],
    ids=["exits", "closes the report", "writes a report of its own"],
)
def test_code_without_a_genuine_verdict_has_not_passed(source: str) -> None:
    assert not run(source).passed


def test_code_that_sleeps_is_ended() -> None:
    assert run("import time\ntime.sleep(1000)", limits=BRIEF).ending == "time"


def test_code_that_loops_is_ended_by_processor_time() -> None:
    found = run("while True: pass", limits=Limits(wall_seconds=60, cpu_seconds=1))
    assert found == Outcome("time", "too much processor time")


def test_code_that_ignores_signals_and_exceptions_is_ended() -> None:
    source = """
import signal
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    try:
        while True: pass
    except BaseException:
        pass
"""
    assert run(source, limits=BRIEF).ending == "time"


def test_code_that_prints_without_end_is_ended() -> None:
    assert run("while True: print('x' * 100000)", limits=BRIEF).ending == "time"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not enforce RLIMIT_AS")
def test_code_that_allocates_is_stopped() -> None:
    assert run("x = bytearray(3 << 30)").detail.startswith("MemoryError")


FORK_BY_C = """
import ctypes
assert ctypes.CDLL(None).fork() == -1
"""
FORK_LOOP = """
import os
while True:
    os.fork()
"""


@pytest.mark.parametrize("layer", BY_LAYER)
@pytest.mark.parametrize(
    "source",
    [
        FORK_LOOP,
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true') and 1 / 0",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.kill(os.getppid(), 0)",
        "import os\nos.killpg(0, 0)",
        "import socket\nsocket.socket()",
        "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    ],
)
def test_processes_signals_and_sockets_are_denied(source: str, layer: str) -> None:
    found = run(source, layer)
    assert found.ending == "raised"
    assert found.detail.startswith(("PermissionError", "ZeroDivisionError")), found.detail


@needs_kernel
@pytest.mark.parametrize("layer", ["both", "kernel"])
def test_the_kernel_denies_what_a_hook_does_not_see(layer: str) -> None:
    """Calls through C, by which code gets past an audit hook."""
    if layer == "kernel":
        assert run(FORK_BY_C, layer).passed
        assert run("import ctypes\nassert ctypes.CDLL(None).kill(1, 0) == -1", layer).passed
        opened = "import ctypes\nassert ctypes.CDLL(None).open(b'/etc/passwd', 0) == -1"
        assert run(opened, layer).passed
    posix = "import _posixsubprocess, os\n"
    arguments = "[b'/bin/true'], [b'true'], None, (), None, None, -1, -1, -1, -1, -1, -1, -1, -1"
    forked = posix + f"_posixsubprocess.fork_exec({arguments})"
    assert run(forked, layer).ending == "raised"
    assert run("import threading\nthreading.Thread(target=print).start()", layer).ending == "raised"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file that everybody may read and write, outside the program's folder."""
    file = tmp_path / "secret.txt"
    file.write_text("secret")
    for path in (tmp_path, file):
        path.chmod(0o777)
    return file


@pytest.mark.parametrize("layer", BY_LAYER)
@pytest.mark.parametrize(
    "source",
    [
        "open({path!r}).read()",
        "import os\nos.open({path!r}, os.O_RDONLY)",
        "import os\nos.symlink({path!r}, 'link')\nopen('link').read()",
        "import os\nos.link({path!r}, 'link')\nopen('link').read()",
        "import os\nos.listdir(os.path.dirname({path!r}))",
        "import os\nos.chdir(os.path.dirname({path!r}))\nopen('secret.txt').read()",
        "open({path!r}, 'w')",
        "open({path!r} + '.new', 'w')",
        "import os\nos.remove({path!r})",
        "import os\nos.truncate({path!r}, 0)",
        "import os\nos.rename({path!r}, 'mine.txt')",
        "import os\nos.mkdir({path!r} + '.folder')",
        "import shutil\nshutil.rmtree(__import__('os').path.dirname({path!r}))",
    ],
)
def test_files_outside_the_folder_are_out_of_reach(outside: Path, source: str, layer: str) -> None:
    found = run(source.format(path=str(outside)), layer)
    assert found.ending == "raised"
    assert found.detail.startswith(("PermissionError", "OSError")), found.detail
    assert outside.read_text() == "secret"
    assert [path.name for path in outside.parent.iterdir()] == ["secret.txt"]


def test_no_environment_variable_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    source = "import os\nassert 'SECRET_TOKEN' not in os.environ\nassert 'PATH' not in os.environ"
    assert run(source).passed
    assert run("import os\nassert os.getcwd() == os.environ['HOME']").passed


@pytest.mark.parametrize(
    ("source", "ending"),
    [
        ("open('a', 'wb').write(b'x' * (5 << 20))", "raised"),
        ("n = 0\nwhile True:\n    open(str(n), 'wb').write(b'x' * (3 << 20)); n += 1", "files"),
        ("n = 0\nwhile True:\n    open(str(n), 'w'); n += 1", "files"),
        ("import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')", "files"),
    ],
    ids=["one large file", "many large files", "many files", "nested folders"],
)
def test_the_disk_is_not_filled_and_nothing_is_left(
    source: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(source).ending == ending
    assert list(tmp_path.iterdir()) == []


def test_folders_that_the_program_closes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root can still measure them; for others the program has failed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = "import os\nos.makedirs('d/e')\nos.chmod('d', 0)\nos.chmod('.', 0)"
    assert run(source).ending == ("passed" if os.geteuid() == 0 else "files")
    assert list(tmp_path.iterdir()) == []


def _children() -> set[str]:
    """The processes that this one has started and not waited for."""
    tasks = Path("/proc/self/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


def test_what_it_uses_is_released() -> None:
    before, children = set(os.listdir("/dev/fd")), _children()
    for source in ("pass", "1 / 0", "import os\nos._exit(3)"):
        run(source)
    assert len(os.listdir("/dev/fd")) == len(before)
    assert _children() == children  # the test runner may have some of its own


def test_a_long_program_is_run() -> None:
    """Longer than the buffer of a pipe."""
    assert run("\n".join(f"x{n} = {n}" for n in range(20000)) + "\nassert x19999 == 19999").passed


@needs_kernel
def test_a_filter_answers_each_denied_call_with_an_error() -> None:
    """The jumps of the filter, followed by hand, end at the error for each denied number."""
    numbers = [57, 41, 62]
    program = seccomp.filter_program(numbers, 0xC000003E)

    def answer(number: int, architecture: int) -> int:
        loaded, at = 0, 0
        while True:
            code, if_true, if_false, operand = program[at]
            at += 1
            if code == seccomp._LOAD:
                loaded = architecture if operand == seccomp._ARCHITECTURE else number
            elif code == seccomp._RETURN:
                return operand
            else:
                holds = loaded == operand if code == seccomp._EQUAL else loaded >= operand
                at += if_true if holds else if_false

    assert {answer(n, 0xC000003E) for n in numbers} == {seccomp._ERROR}
    assert answer(0, 0xC000003E) == seccomp._ALLOW
    assert answer(0x40000000 + 57, 0xC000003E) == seccomp._ERROR
    assert answer(0, 0x40000003) == seccomp._KILL


def test_a_system_without_landlock_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert landlock.version() == 0
    assert not seccomp.available()
    assert not enforced_by_kernel()
    assert not landlock.restrict([], [])


def test_limits_are_in_bytes() -> None:
    found = run("x = bytearray(200 << 20)", limits=Limits(wall_seconds=60, memory=128 * MiB))
    assert found.ending == "raised" or sys.platform == "darwin"
