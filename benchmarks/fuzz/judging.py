"""One input judged: in this process, or in one of its own that may crash, hang or eat memory."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import logging
import mmap
import os
import re
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Final, NamedTuple

import torch

from benchmarks.fuzz import scratch
from benchmarks.fuzz.target import KINDS, BrokenPromiseError, RawError, Target, Verdict
from inshrink_core.errors import InshrinkError

MEBIBYTE: Final = 1 << 20
MAX_MESSAGE_CHARS: Final = 4096
_N_FRAMES: Final = 4
_ALLOCATION = re.compile(r"allocat|not enough memory|out of memory", re.IGNORECASE)
_CASE = struct.Struct("<qdd")
_COUNTS = struct.Struct(f"<{len(KINDS)}Q")
_NO_CASE = -(1 << 63)
_TICK = os.sysconf("SC_CLK_TCK")
_MAX_FINDING_CHARS = 2000
_M_ARENA_MAX = -8
"""``malloc.h`` of glibc."""
_ROOT = f"{Path(__file__).parents[2]}/"


class Limits(NamedTuple):
    """What an input may cost. Processor time, not wall time: the machine may be busy.

    A process is told that it has so much memory and disk: an archive may claim that much and no more, and
    whatever the engine then allocates beyond, touched or not, fails.
    """

    cpu_seconds: float = 5.0
    wall_seconds: float = 240.0
    memory_nbytes: int = 256 * MEBIBYTE
    disk_nbytes: int = 64 * MEBIBYTE


def confine(limits: Limits) -> None:
    """Bound this process's memory and disk; what is beyond becomes an error, not a swap storm."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # An arena for each thread takes 64 MiB of addresses, which say nothing of the input.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    bound_memory(limits)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.disk_nbytes, limits.disk_nbytes))
    usage = shutil.disk_usage

    def small(path: str) -> object:
        found = usage(path)
        return found._replace(free=min(found.free, limits.disk_nbytes))

    shutil.disk_usage = small  # type: ignore[assignment]
    # Scratch files need not survive a crash.
    os.fsync = lambda descriptor: None  # type: ignore[assignment]


def bound_memory(limits: Limits) -> None:
    """Bound what this process may take beside what it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * mmap.PAGESIZE + limits.memory_nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def judge(target: Target, data: bytes) -> Verdict:
    """Execute one input in this process, which is confined, and say what it came to."""
    begun = time.process_time()
    return _executed(target, data)._replace(cpu_seconds=time.process_time() - begun)


def _executed(target: Target, data: bytes) -> Verdict:
    try:
        kind = target.execute(data) or "same"
    except BrokenPromiseError as error:
        return Verdict("silent", f"silent:{target.name}:{error.promise}", str(error), _frames(error))
    except AssertionError as error:
        return _raw(error, "silent")
    except InshrinkError as error:
        return _refused(error)
    except RawError as error:
        return Verdict(
            "raw", _key("raw", str(error).partition(":")[0], error.frames), str(error), error.frames
        )
    except Exception as error:
        return _raw(error)
    if kind not in KINDS:
        raise ValueError(f"{target.name} says '{kind}'")
    return Verdict(kind)


def _refused(error: InshrinkError) -> Verdict:
    text, frames = str(error), _frames(error)
    if is_too_big(error):
        return Verdict("memory", _key("memory", "disk", frames), f"disk above the bound: {text}", frames)
    if len(text) > MAX_MESSAGE_CHARS:
        return Verdict("long", _key("long", type(error).__name__, frames), text[:200], frames)
    return Verdict("refused", message=text)


def is_too_big(error: BaseException | None) -> bool:
    """Whether a file became larger than any may be: disk above the bound."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return True
        error = error.__cause__ or error.__context__
    return False


def _raw(error: Exception, kind: str = "raw") -> Verdict:
    frames, text = _frames(error), f"{type(error).__name__}: {error}"[:_MAX_FINDING_CHARS]
    starved = isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _ALLOCATION.search(text) is not None
    )
    big = isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EFBIG)
    kind = "memory" if starved or big else kind
    return Verdict(kind, _key(kind, type(error).__name__, frames), text, frames)


def _key(kind: str, what: str, frames: tuple[str, ...]) -> str:
    """Equal stacks are one finding, whatever their line numbers and callers."""
    return f"{kind}:{what}:{re.sub(r':[0-9]+', '', frames[0]) if frames else ''}"


def _frames(error: BaseException) -> tuple[str, ...]:
    found = traceback.extract_tb(error.__traceback__)
    return project_frames((frame.filename, frame.lineno or 0, frame.name) for frame in reversed(found))


def project_frames(stack: Iterable[tuple[str, int, str]]) -> tuple[str, ...]:
    """Return the innermost frames that are the engine's, else those of what attacks it."""
    engine, attack = [], []
    for name, line, function in stack:
        if "inshrink_core/" in name:
            engine.append(f"{name.rpartition('inshrink_core/')[2]}:{line} {function}")
        elif name.startswith(_ROOT) and "site-packages" not in name:
            attack.append(f"{name.removeprefix(_ROOT)}:{line} {function}")
    return tuple((engine or attack)[:_N_FRAMES])


class Worker:
    """A forked process that judges inputs, as seen from outside; what it notes outlives it.

    Parameters
    ----------
    work
        What it does, given this object; it ends then, come what may.
    limits
        What one input may cost.
    """

    def __init__(self, work: Callable[[Worker], None], limits: Limits) -> None:
        self.limits = limits
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)
        self._stack = scratch.root() / f"stack-{os.getpid()}-{id(self)}"
        self.end()
        self.reports, self._theirs = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            self._theirs.close()
            return
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # PyTorch makes its pool anew after a fork, and fails if two threads are the first to ask for it.
            torch.set_num_threads(1)
            logging.getLogger("inshrink_core").setLevel(logging.ERROR)  # millions of warnings tell nothing
            self._watch_stack()
            self.reports.close()
            confine(limits)
            work(self)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def report(self, found: object) -> None:
        """Send something, in the worker, to `reports`."""
        self._theirs.send(found)

    def begin(self, case: int) -> None:
        """Note, in the worker, that a case begins."""
        _CASE.pack_into(self._shared, 0, case, time.process_time(), time.monotonic())

    def end(self) -> None:
        """Note, in the worker, that no case is under way."""
        _CASE.pack_into(self._shared, 0, _NO_CASE, 0.0, 0.0)

    def case(self) -> int | None:
        """Return the case under way, None between cases."""
        case: int = _CASE.unpack_from(self._shared)[0]
        return None if case == _NO_CASE else case

    def count(self, kinds: Mapping[str, int]) -> None:
        """Note, in the worker, what the cases of its batch came to so far."""
        _COUNTS.pack_into(self._shared, _CASE.size, *(kinds.get(kind, 0) for kind in KINDS))

    def counts(self) -> dict[str, int]:
        """Return what the cases of the batch came to."""
        return dict(zip(KINDS, _COUNTS.unpack_from(self._shared, _CASE.size), strict=True))

    def overrun(self) -> bool:
        """Tell whether the case under way has had more time than it may have."""
        case, cpu, wall = _CASE.unpack_from(self._shared)
        if case == _NO_CASE:
            return False
        if time.monotonic() - wall > self.limits.wall_seconds:
            return True
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return (int(fields[11]) + int(fields[12])) / _TICK - cpu > self.limits.cpu_seconds

    def _watch_stack(self) -> None:
        """Have, in the worker, its stack written where it crashes, or where it is asked for."""
        file = self._stack.open("w")
        faulthandler.enable(file, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)

    def _frames(self) -> tuple[str, ...]:
        """Return the frames of the stack that was written; empty if none was."""
        try:
            text = self._stack.read_text()
        except OSError:
            return ()
        found = re.findall(r'File "([^"]+)", line ([0-9]+) in (\S+)', text)
        return project_frames((name, int(line), function) for name, line, function in found) if found else ()

    def hung(self, target: str) -> Verdict:
        """End a process that overran, and return the verdict on its input."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.2)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        frames = self._frames()
        key = _key("hang", target if not frames else "", frames)
        return Verdict("hang", key, "no end", frames, self.limits.cpu_seconds)

    def crashed(self, target: str) -> Verdict:
        """Return the verdict on the input that ended a process."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        how, frames = signal.Signals(-code).name if code < 0 else f"exit code {code}", self._frames()
        return Verdict("crash", _key("crash", f"{how}:{'' if frames else target}", frames), how, frames)

    def close(self) -> None:
        """Remove what it left."""
        self.reports.close()
        self._stack.unlink(missing_ok=True)
        self._shared.close()
        scratch.forget(self.pid)


def judge_alone(target: Target, data: bytes, limits: Limits) -> Verdict:
    """Judge one input in a process of its own."""

    def work(worker: Worker) -> None:
        worker.begin(0)
        worker.report(judge(target, data))

    worker = Worker(work, limits)
    try:
        while not worker.reports.poll(0.05):
            if worker.overrun():
                return worker.hung(target.name)
        verdict: Verdict = worker.reports.recv()
    except EOFError:
        return worker.crashed(target.name)
    else:
        os.waitpid(worker.pid, 0)
        return verdict
    finally:
        worker.close()
