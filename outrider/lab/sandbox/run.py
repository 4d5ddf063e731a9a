"""Starts a process for a program, waits for its verdict, and removes all that it leaves."""

import contextlib
import dataclasses
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import outrider
from outrider.core.errors import InvalidParameterError
from outrider.lab.sandbox import landlock, seccomp
from outrider.lab.sandbox.limits import Limits

Ending = Literal["passed", "raised", "time", "files", "died"]
"""How a program ended: it ran to its end; it raised an exception, or left early; it took too long;
it wrote too much; its process died without a verdict."""

DEFAULTS = Limits()
_INTERVAL = 0.05  # seconds between two measurements of the files
_MOST_REPORT = 65536
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/urandom")


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        ending: how.
        detail: the exception, or the limit that was hit, in one line.
    """

    ending: Ending
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ran to its end without an exception."""
        return self.ending == "passed"


def enforced_by_kernel() -> bool:
    """Whether the kernel confines the program. Elsewhere an audit hook does, a safety net."""
    return landlock.version() > 0 and seccomp.available()


def run_program(
    source: str, limits: Limits = DEFAULTS, *, kernel: bool = True, hook: bool = True
) -> Outcome:
    """Runs Python source in a process and a temporary folder of its own. Returns in little more
    than ``limits.wall_seconds``, whatever the program does.

    The program gets no environment variables of this process, no input, and no output. It may read
    its folder and Python's libraries, and write into its folder.

    Args:
        source: the program. It has passed if it runs to its end without an exception.
        limits: what it may use.
        kernel: let the kernel confine the program, where it can.
        hook: let an audit hook confine it as well.

    Raises:
        InvalidParameterError: the system has no POSIX processes.
    """
    if os.name != "posix":
        raise InvalidParameterError(
            f"generated code runs on Linux and macOS only, not on {sys.platform}: its process "
            "could not be confined"
        )
    with _folder() as folder:
        return _run(source, limits, folder, {"kernel": kernel, "hook": hook})


def _run(source: str, limits: Limits, folder: str, layers: dict[str, bool]) -> Outcome:
    report, theirs = os.pipe()
    key = secrets.token_hex(16)
    package = str(Path(outrider.__file__).resolve().parent.parent)
    order = {
        "source": source,
        "limits": dataclasses.asdict(limits),
        "folder": folder,
        "readable": _readable(),
        "package": package,
        "report": theirs,
        "key": key,
        **layers,
    }
    try:
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(order).encode("utf-8", "surrogatepass"))
            stdin.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-B", "-m", "outrider.lab.sandbox.child"],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=_environment(package, folder),
                pass_fds=(theirs,),
                start_new_session=True,
            )
        os.close(theirs)
        theirs = -1
        try:
            verdict = _wait(report, limits, folder)
        finally:
            status = _end(process)
        return verdict if isinstance(verdict, Outcome) else _outcome(verdict, key, status)
    finally:
        os.close(report)
        if theirs >= 0:
            os.close(theirs)


def _wait(report: int, limits: Limits, folder: str) -> bytes | Outcome:
    """What the process reports, nothing if it ended without a report; or the limit that it hit."""
    deadline = time.monotonic() + limits.wall_seconds
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([report], [], [], min(left, _INTERVAL))
        if used := _over(folder, limits):
            return Outcome("files", used)
        if ready:
            return os.read(report, _MOST_REPORT)
    return Outcome("time", f"more than {limits.wall_seconds:g} s of wall time")


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Kills the process and its session; returns the exit status.

    The process has not been waited for, so its number cannot be that of another one.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    return process.wait()


def _outcome(report: bytes, key: str, status: int) -> Outcome:
    try:
        verdict: Any = json.loads(report)
        genuine = verdict["key"] == key
    except (ValueError, TypeError, KeyError):
        genuine = False
    if not genuine:
        if status == -signal.SIGXCPU:
            return Outcome("time", "too much processor time")
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        return Outcome("died", f"ended {how} before the end of the program")
    return Outcome("passed" if verdict["passed"] else "raised", verdict["detail"])


def _over(folder: str, limits: Limits) -> str:
    """The limit on files that a folder exceeds; empty if none."""
    num = total = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    num += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
                    if num > limits.num_files:
                        return f"more than {limits.num_files} files"
                    if total > limits.total_size:
                        return f"more than {limits.total_size} bytes in files"
        except (FileNotFoundError, PermissionError):  # removed, or closed by the program
            continue
        except OSError as error:
            return f"files that cannot be measured: {error.strerror}"
    return ""


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """An empty temporary folder, removed with all that was written into it."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix="outrider-"))
    try:
        yield folder
    finally:
        # A program may nest folders deeper than Python's own functions can descend.
        subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)


def _environment(package: str, folder: str) -> dict[str, str]:
    return {
        "PYTHONPATH": package,
        "PYTHONHASHSEED": "0",
        "HOME": folder,
        "TMPDIR": folder,
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _readable() -> list[str]:
    """Where Python's libraries are."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in kinds}
    libraries.add(str(Path(sys.base_prefix).resolve() / "lib"))
    return [*sorted(libraries), *_SYSTEM, *_DEVICES]
