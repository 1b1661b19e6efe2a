"""Changes of floats take the bits that were estimated when their contexts were chosen."""

import pytest
import torch

from inshrink_core.coding.changes import encode_changes, plan_changes


@pytest.mark.parametrize(("n", "slack"), [(1000, 0.03), (30_000, 0.001)])
def test_the_estimated_bits_are_those_that_encoding_takes(n, slack):
    generator = torch.Generator().manual_seed(n)
    earlier = torch.randn(n, generator=generator)
    values = earlier + 1e-4 * torch.randn(n, generator=generator)
    before = earlier.view(torch.int32)
    plan = plan_changes(values.view(torch.int32), before, None, 23)
    assert 8 * len(encode_changes(before, None, plan)) == pytest.approx(plan.bits, rel=slack)
