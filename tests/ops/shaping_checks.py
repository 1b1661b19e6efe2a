"""Shaped rounding by every back end is that of the reference, bit for bit."""

import itertools

import torch

from inshrink_core.codecs.shaping import signs_of
from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.cpu.factors import factorize
from inshrink_core.ops.lattice import Lattice
from inshrink_core.ops.shaping import shape_changes
from tests.ops.interpreted import is_interpreted, kernels
from tests.strategies import normal

LATTICE = Lattice(2.0**-10, 256, 4.0, 2**24 - 1)
NEAREST = 0


def uneven(n, octaves=8.0):
    """A matrix H whose spectrum falls by some powers of two."""
    turned, _ = torch.linalg.qr(normal((n, n), 1).double())
    return turned @ torch.diag(torch.logspace(0, -octaves, n, base=2.0, dtype=torch.float64)) @ turned.T


def factors_of(matrix, damping=1.0):
    n = matrix.shape[0]
    signs = signs_of(n)
    return next(factorize(matrix.numpy() @ signs, signs, float(matrix.trace()), (damping,)))


def changes_by(context, device, *arguments):
    with context:
        found = shape_changes(arguments[0].to(device), *arguments[1:])
    return found[0].cpu().view(torch.int32), found[1:]


def check_back_ends_agree(device):
    slow = is_interpreted(device)
    for rows, n in ((18, 9), (20, 40)) if slow else ((1, 8), (16, 33), (37, 150)):
        values = normal((rows * n,), 3) * 100
        values[1], values[3], values[4] = float("nan"), 1e30, -float("inf")
        integers = torch.randint(-3000, 3000, (rows * n,), dtype=torch.int32, generator=torch.Generator())
        base = values + 15 * normal((rows * n,), 4)
        of_columns, of_rows = factors_of(uneven(n)), factors_of(uneven(rows))
        starts = ((None, NEAREST), (base, NEAREST), (base, 900))
        cases = list(itertools.product(starts, (None, of_rows)))
        if slow:  # one half of the cases for each size
            cases = cases[:: len(cases) - 1] if n > 32 else cases[1:-1]
        for (start, grade), down in cases:
            arguments = (values, start, integers, LATTICE, grade, of_columns, down)
            expected = changes_by(force_backend(Backend.REFERENCE), "cpu", *arguments)
            found = changes_by(kernels(), device, *arguments)
            assert torch.equal(expected[0], found[0])
            assert expected[1] == found[1]
