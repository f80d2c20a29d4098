"""What the process of a tenant's own environment may use: memory, and CPU seconds a session.

Memory is the address space (RLIMIT_AS), because the kernel enforces no limit on resident memory of one process: what
is mapped counts, touched or not. CPU seconds are the kernel's own count (RLIMIT_CPU, SIGXCPU). Both are there against
mistakes; code that means harm can raise a soft limit again, and belongs in a container (`own.image`). Wall-clock time
is the caller's business (`step_timeout_s`), which a process that sleeps does not escape either.
"""

from __future__ import annotations

import math
import resource
import signal
import sys
from typing import Any


class CpuSecondsUsed(BaseException):
    """The session's CPU seconds are used up; no `except Exception` of the environment takes it for its own."""


def begin(folder: str, memory_mb: int | None, cpu_s: float) -> None:
    """Limit this process from here on; `cpu_s` count anew from each call.

    Args:
        folder: with the environment's code; modules that are known already are not replaced by it.
        memory_mb: None leaves memory to the container.
        cpu_s: CPU seconds from now.
    """
    if folder not in sys.path:
        sys.path.append(folder)
        sys.dont_write_bytecode = True  # the folder is the tenant's
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    signal.signal(signal.SIGXCPU, _used_up)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    # Sent again every second beyond it, so swallowing the first does not help.
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + cpu_s), hard))


def _used_up(_signal: int, _frame: Any) -> None:
    raise CpuSecondsUsed


def fault(op: str, error: CpuSecondsUsed | MemoryError) -> str:
    """What a tenant is told of a limit that was reached in `op`."""
    if isinstance(error, CpuSecondsUsed):
        return f"{op}: own.cpu_s is used up; possible: that many CPU seconds a session; compute less, or raise it"
    line = " ".join(str(error).split())[:200] or "no details"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return f"{op}: the simulator raised MemoryError: {line}"
    return f"{op}: got {line}; possible: own.memory_mb, which is {limit >> 20}; use less memory, or raise it"
