"""The guard: a small process that ends everything of one platform when its supervisor is gone, however it went.

It waits on a pipe that only the supervisor holds open. The end of file comes with an orderly exit and with
`kill -9` alike, so no flow run, Dask worker or simulator outlives the platform. Members are recognised by
`JOYNEXUS_PLATFORM` in their environment, which reaches also those that started a session of their own (flow
runs do). What it cannot do: run when it is itself killed together with the supervisor; `joynexus down` and the
next `joynexus up` make the same sweep.
"""

from __future__ import annotations

import os
import sys

import psutil

MARK = "JOYNEXUS_PLATFORM"


def members(mark: str) -> list[psutil.Process]:
    """Live processes whose environment carries `mark`, without this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # gone meanwhile, a zombie, or another user's
            continue
    return found


def sweep(mark: str, rounds: int = 20) -> int:
    """Kill all members, repeated while dying ones still start others; returns how many were killed."""
    killed = 0
    for _ in range(rounds):
        found = members(mark)
        if not found:
            break
        for process in found:
            try:
                process.kill()
                killed += 1
            except psutil.Error:
                continue
        psutil.wait_procs(found, timeout=2)
    return killed


if __name__ == "__main__":
    sys.stdin.buffer.read()  # until the supervisor's end of the pipe closes
    sweep(sys.argv[1])
