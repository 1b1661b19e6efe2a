"""Processes that a test starts, and what /proc tells of them."""

import socket
import subprocess
import time
from pathlib import Path


def ran(*command, **options):
    """Run a command to its end; return its exit code and what it has said."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def free_port():
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, seconds=200):
    """Wait until a condition holds, on a machine that is busy with other tests; return what it gives."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < ends, "this did not become true"
        time.sleep(0.02)
    return found


def aborted_at_exit(output):
    """Whether a rank has said that gloo's threads aborted it as Python ended (pytorch/pytorch#190489)."""
    return "terminate called without an active exception" in output


def descendants(pid):
    """Return the processes that a process has started, and those that they have, by their command lines."""
    parents: dict[int, int] = {}
    found: dict[int, str] = {}
    for item in Path("/proc").iterdir():
        try:
            stat = (item / "stat").read_text()
            parents[int(item.name)] = int(stat.rpartition(") ")[2].split()[1])
        except (OSError, ValueError):
            continue
    for parent in parents:
        above = parent
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and parent != pid:
            try:
                found[parent] = Path(f"/proc/{parent}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def is_at_work(pid, line):
    """Whether a process that was seen is there still: the same, and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        return state != "Z" and Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") == line
    except OSError:
        return False
