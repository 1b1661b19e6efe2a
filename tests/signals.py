"""Children that hear Ctrl-C: a shell starts what runs in its background with the signal ignored."""

import signal


def hear_ctrl_c():
    """Give SIGINT its default meaning; for the `preexec_fn` of a child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
