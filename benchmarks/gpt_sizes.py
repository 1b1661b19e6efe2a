"""The task `char-gpt` with models below its scale ``medium``, trained alike; for `benchmarks.sizes`."""

from __future__ import annotations

from inshrink_lab.tasks.char_gpt import CharGPTTask


class _Sized(CharGPTTask):
    def __init__(self) -> None:
        for name, value in self.medium.items():
            if name not in type(self).__dict__:
                setattr(self, name, value)


class GPT05(_Sized):
    """0.5 M parameters."""

    name = "char-gpt-0.5m"
    width, depth, heads, peak_learning_rate = 96, 4, 3, 2e-3


class GPT18(_Sized):
    """1.8 M parameters."""

    name = "char-gpt-1.8m"
    width, depth, heads, peak_learning_rate = 192, 4, 4, 1.5e-3


class GPT63(_Sized):
    """6.3 M parameters."""

    name = "char-gpt-6.3m"
    width, depth, heads, peak_learning_rate = 320, 5, 5, 1e-3
