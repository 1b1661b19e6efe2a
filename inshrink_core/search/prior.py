"""What a configuration may cost on a run of which no trial tells: rules of thumb from other runs.

½ Σ h·e² orders configurations of one run well, but needs a factor, and that is not one number: on runs with
second moments it lies between hundreds and tens of thousands. The codecs' plainer rules are off by less. None
is a measurement; `benchmarks/results/ratio.csv` and ``search.csv`` have what they come from.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from inshrink_core.chain import ChainConfig

__all__ = ["DROP_PER_NAT", "Prior", "prior_of"]

DROP_PER_NAT: Final = 1.2
"""Drop of the worst step over its divergence: median over the same rows, .5 to 16; as metrics differ, so does
it."""


class Prior(NamedTuple):
    """Drop and divergence, nats, that the worst step of a chain may have."""

    drop: float
    divergence: float


def prior_of(chain: ChainConfig, relative_error: float) -> Prior:
    """Return what other runs let one expect.

    Parameters
    ----------
    chain
        The configuration.
    relative_error
        Root of squared error over squared norm of the weights, at the worst step.

    Examples
    --------
    >>> from inshrink_core.codec import get_codec
    >>> qd = get_codec("qd")
    >>> prior_of(ChainConfig(config=qd()), 0.0)
    Prior(drop=0.0, divergence=0.0)
    """
    divergence = chain.config.expected_divergence(relative_error)
    return Prior(drop=DROP_PER_NAT * divergence, divergence=divergence)
