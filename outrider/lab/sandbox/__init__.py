"""Runs Python code that a model wrote, in a process that can do little else than compute.

limits    time, memory and file sizes (POSIX resource limits)
landlock  which files can be opened (Linux 5.13 or newer)
seccomp   which system calls are allowed (Linux on x86-64 and ARM)
audit     the same two, by hooks of Python itself
child     the program that runs in the new process
run       starts it, waits for it, and removes what it leaves
consent   nothing of it happens unless the user has allowed it

What holds where:

    code that            is stopped by                          elsewhere
    loops, sleeps        wall time in ``run``, RLIMIT_CPU       the same
    allocates memory     RLIMIT_AS                              not on macOS
    starts processes     seccomp                                RLIMIT_NPROC unless root; audit hook
    fills the disk       RLIMIT_FSIZE; total size in ``run``    the same
    reads other files    Landlock                               audit hook
    opens connections    seccomp                                audit hook
    kills processes      seccomp                                audit hook

The system enforces the middle column: it is a sandbox as good as the Linux kernel. An audit hook is
a safety net against accidents. Code written to do so gets past it, for example through a library in
C. :func:`enforced_by_kernel` says which of the two a machine has. Neither keeps code from using all
of its time and memory, nor from forging its own verdict: it runs in the process that reports it.
"""

from typing import TYPE_CHECKING

from outrider.imports.lazy import lazy

if TYPE_CHECKING:
    from outrider.lab.sandbox.consent import allow_generated_code
    from outrider.lab.sandbox.limits import Limits
    from outrider.lab.sandbox.run import Outcome, enforced_by_kernel, run_program

__all__ = ["Limits", "Outcome", "allow_generated_code", "enforced_by_kernel", "run_program"]

_HOME = {
    "Limits": "outrider.lab.sandbox.limits",
    "Outcome": "outrider.lab.sandbox.run",
    "allow_generated_code": "outrider.lab.sandbox.consent",
    "enforced_by_kernel": "outrider.lab.sandbox.run",
    "run_program": "outrider.lab.sandbox.run",
}

__getattr__, __dir__ = lazy(__name__, _HOME)
