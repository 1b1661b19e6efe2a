"""The task `char-gpt` in four sizes, trained alike on one core; for `benchmarks.sizes`."""

from __future__ import annotations

from inshrink_lab.tasks.char_gpt import CharGPTTask


class GPT05(CharGPTTask):
    """0.5 M parameters."""

    name = "char-gpt-0.5m"
    context, batch_size, n_steps, n_validation_windows = 128, 4, 1000, 64
    width, depth, heads, peak_learning_rate = 96, 4, 3, 2e-3


class GPT18(GPT05):
    """1.8 M parameters."""

    name = "char-gpt-1.8m"
    width, depth, heads, peak_learning_rate = 192, 4, 4, 1.5e-3


class GPT63(GPT05):
    """6.3 M parameters."""

    name = "char-gpt-6.3m"
    width, depth, heads, peak_learning_rate = 320, 5, 5, 1e-3


class GPT254(GPT05):
    """25.4 M parameters: a training of a quarter of an hour on one core."""

    name = "char-gpt-25.4m"
    width, depth, heads, peak_learning_rate = 512, 8, 8, 6e-4
