"""Children that hear Ctrl-C: a shell starts what runs in its background with the signal ignored."""

import signal
import subprocess
import sys

from tests.processes import until


def hear_ctrl_c():
    """Give SIGINT its default meaning; for the `preexec_fn` of a child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(once, *words):
    """Give a command Ctrl-C once a condition holds; return its exit code and what it has said."""
    command = [sys.executable, "-P", "-m", "inshrink_core.cli", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = subprocess.Popen(command, preexec_fn=hear_ctrl_c, **pipes)
    until(once)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    return started.returncode, out, err
