"""Keys, their representatives and the bins that occur."""

import numpy as np
import pytest
import torch

from inshrink_core.ops.quantize import histogram16
from inshrink_core.quantization.codebook import key_histogram, key_values, sorted_keys


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_representative_is_in_the_middle_of_the_values_that_share_a_key(dtype):
    torch_dtype = getattr(torch, dtype)
    values = torch.tensor([1.0, 1.5, -3.0, 100.0], dtype=torch_dtype)
    for value in values.tolist():
        key = int(histogram16(torch.tensor([value], dtype=torch_dtype)).nonzero())
        low = torch.tensor([key << 16]).to(torch.int64).to(torch.uint32).view(torch.float32)
        high = torch.tensor([(key << 16) | 0xFFFF]).to(torch.int64).to(torch.uint32).view(torch.float32)
        if dtype == "bfloat16":
            assert key_values(dtype)[key] == value
        else:
            middle = (float(low) + float(high)) / 2
            assert key_values(dtype)[key] == pytest.approx(middle, rel=2**-9)


def test_sorted_keys_order_representatives():
    assert (np.diff(key_values("float32")[sorted_keys()]) >= 0).all()
    assert len(set(sorted_keys().tolist())) == 2 * 0x7F80


def test_histogram_lists_only_occupied_finite_bins():
    counts = histogram16(torch.tensor([1.0, -1.0, 1.0, float("inf"), float("nan")])).numpy()
    histogram = key_histogram(counts, "float32")
    assert histogram.counts.tolist() == [1, 2]
    assert histogram.values[0] == -histogram.values[1]
