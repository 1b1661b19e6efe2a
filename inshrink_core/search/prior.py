"""What a configuration may cost on a run of which no trial tells: rules of thumb from other runs.

½ Σ h·e² orders configurations of one run well, but needs a factor, and that is not one number: on runs with
second moments it lies between hundreds and tens of thousands. Two plainer rules are off by less. Neither is a
measurement; `benchmarks/results/ratio.csv` and ``search.csv`` have what they come from.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from inshrink_core.chain import ChainConfig

__all__ = ["CODEBOOK_DIVERGENCE", "DROP_PER_NAT", "LATTICE_DIVERGENCE", "Prior", "prior_of"]

LATTICE_DIVERGENCE: Final = 1.4e-4
"""Nats that the worst step of a chain diverges by, over the square of the lattice's `coarseness`, which is in
units of the run's own movement: geometric mean over four runs, coarseness 1.5 to 6; .7e-4 to 2.9e-4."""

CODEBOOK_DIVERGENCE: Final = 1.9
"""Nats over the squared relative error of the weights: geometric mean over two runs and eleven settings of
Inshrinkerator, .9 to 4.2. Not for the lattice, whose error lies where the loss does not mind it."""

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
    >>> prior_of(ChainConfig(codec=qd.name, config=qd.config_type()), 0.0)
    Prior(drop=0.0, divergence=0.0)
    """
    if chain.codec == "lattice" and relative_error > 0:
        divergence = LATTICE_DIVERGENCE * float(getattr(chain.config, "coarseness", 0.0)) ** 2
    else:
        divergence = CODEBOOK_DIVERGENCE * relative_error**2
    return Prior(drop=DROP_PER_NAT * divergence, divergence=divergence)
