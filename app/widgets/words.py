"""What the field's words mean, in a sentence each: the tips behind them, wherever they stand."""

from __future__ import annotations

from typing import Final

NATS: Final = (
    "Divergence: how far the restored model's predictions are from the original's, the mean "
    "Kullback–Leibler divergence. A nat is its unit with the natural logarithm, 1.44 bits; 0 is the same."
)
GAIN: Final = (
    "Restore gain: how much of the movement since the previous checkpoint survives a restore. 1 is all of "
    "it, 0 rolls training back."
)
NOISE: Final = (
    "Restore noise: what a restore adds to the movement, its squared error as a share of the movement's."
)
PROXY: Final = (
    "A stand-in for measuring: the rounding error of each layer, squared and weighted with how sharply the "
    "loss reacts to it. Trials of an evaluator calibrate it."
)
DAMAGE: Final = "What rounding is expected to cost, by the proxy: the weighted squared error, of all layers."
RATIO: Final = "Raw bytes of everything that is stored, optimizer state included, over bytes of the archive."
