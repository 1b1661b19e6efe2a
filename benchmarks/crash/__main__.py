"""``python -m benchmarks.crash [SECONDS]``: end every verb where it hurts, and judge what is left.

Four modes. *kill*: SIGKILL at a random system call on a file, before, amid and after it. *fault*: every such
call fails, one after the other, as on a full disk, a broken one and one that turns read-only. *power*: what a
power loss may leave after every call, where only what was synced is certain. *both*: a kill, and a power loss
in the next run. After each case the archive and the outputs are judged by what an undisturbed run gives, the
verb is run again, and its end is judged.

Before these, *ranks*: two ranks of a training that save into one archive, each killed at every point of a
save (`benchmarks.crash.ranks`), whatever the time.

Apart from these, ``--schedules N``: so many schedules of writers in parts, killed anywhere
(`benchmarks.crash.schedules`), the row of verb *parts* and mode *schedule*.

Exit code 1 where anything was lost, wrong, untyped, refused or left over. ``benchmarks/results/crash.csv``
is written where ``--write`` asks for it.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.crash.shim import NoShimError, build
from benchmarks.fuzz.scratch import memory_folder

FULL_PASS = {"kill": 100, "fault": None, "power": 300, "both": 100}
"""Cases of each verb by mode; None is all there are: every call, failed in every way."""

EXIT_FOUND, EXIT_SKIPPED = 1, 77
"""77 is what automake's tests say where they cannot run."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crash", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "seconds", nargs="?", type=float, default=60.0, help="for all modes and verbs together"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the order and the places")
    parser.add_argument("--verb", action="append", help="these alone; may be repeated")
    parser.add_argument("--mode", action="append", choices=tuple(FULL_PASS), help="the same")
    parser.add_argument("--cases", type=int, help="of each verb and mode, whatever the time")
    parser.add_argument("--whole", action="store_true", help=f"whatever the time: {FULL_PASS} of each verb")
    parser.add_argument(
        "--prove", action="store_true", help="plant defects; exit code 1 where one is not found"
    )
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/crash.csv, keeping rows of other verbs"
    )
    parser.add_argument(
        "--schedules", type=int, help="so many schedules of writers in parts, and nothing else"
    )
    return parser.parse_args()


def _start_with_shim() -> int:
    """Run this again with the shim before the C library, one thread, and a folder that is removed."""
    library = build()
    with tempfile.TemporaryDirectory(
        prefix="inshrink-crash-", dir=memory_folder(), ignore_cleanup_errors=True
    ) as folder:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        environment = {
            **os.environ,
            **threads,
            "LD_PRELOAD": str(library),
            "INSHRINK_CRASH_FOLDER": folder,
            "INSHRINK_CRASH_SCRATCH": str(scratch),
            "TMPDIR": str(scratch),
        }
        command = [sys.executable, "-m", "benchmarks.crash", *sys.argv[1:]]
        pid = os.posix_spawn(command[0], command, environment)
        try:
            _, status = os.waitpid(pid, 0)
        except KeyboardInterrupt:
            _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _work(folder: Path, arguments: argparse.Namespace) -> int:
    """Run the cases; the shim is loaded."""
    os.environ.pop("LD_PRELOAD", None)  # children that are other programs do without
    import torch

    from benchmarks.crash.judging import observed
    from benchmarks.crash.plants import prove
    from benchmarks.crash.report import Work
    from benchmarks.crash.shim import Shim
    from benchmarks.crash.verbs import LinearEvaluator

    torch.set_num_threads(1)
    logging.getLogger("inshrink_core").setLevel(
        logging.ERROR
    )  # that a save was quarantined is what is tested
    shim = Shim()
    with observed(shim.note, LinearEvaluator):
        if arguments.prove:
            return 0 if prove(shim, folder, arguments.seed) else EXIT_FOUND
        work = Work(shim, folder, arguments.seed, arguments.verb, arguments.mode)
        cases = FULL_PASS if arguments.whole else dict.fromkeys(FULL_PASS, arguments.cases)
        # In this order: no thread of a verb's is copied into the ranks.
        work.run_ranks(None if arguments.whole else arguments.cases)
        work.run(math.inf if arguments.whole else 3600.0 if arguments.cases else arguments.seconds, cases)
    work.show()
    if arguments.write:
        sys.stderr.write(f"{work.write()}\n")
    return EXIT_FOUND if work.found else 0


def main() -> int:
    """Run the harness and return its exit code."""
    arguments = _arguments()
    if arguments.schedules is not None:
        from benchmarks.crash.report import write_schedules
        from benchmarks.crash.schedules import run_schedules

        begun = time.monotonic()
        run_schedules(arguments.schedules)
        sys.stdout.write(f"{arguments.schedules:,} schedules: nothing was lost, doubled or revived\n")
        if arguments.write:
            sys.stderr.write(f"{write_schedules(arguments.schedules, time.monotonic() - begun)}\n")
        return 0
    folder = os.environ.get("INSHRINK_CRASH_FOLDER")
    try:
        if folder is not None:
            return _work(Path(folder), arguments)
        return _start_with_shim()
    except NoShimError as error:
        sys.stderr.write(f"skipped: {error}\n")
        return EXIT_SKIPPED


if __name__ == "__main__":
    sys.exit(main())
