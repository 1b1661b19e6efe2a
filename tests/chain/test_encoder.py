"""What encoding a frame reads of a checkpoint."""

from collections import Counter

from inshrink_core.chain import ChainConfig
from inshrink_core.chain.encoder import FrameEncoder, Standing
from inshrink_core.codec import get_codec
from tests.builders import memory_checkpoint, seeded


def test_second_moments_are_read_to_plan_and_for_first_moments_but_not_again_for_weights():
    tensors = {
        "w": seeded((64, 64), 0),
        "w@exp_avg": seeded((64, 64), 1),
        "w@exp_avg_sq": seeded((64, 64), 2).square(),
    }
    checkpoint = memory_checkpoint(1, tensors)
    _, results = FrameEncoder(ChainConfig(config=get_codec("lattice")())).encode(checkpoint, Standing())
    assert [result.spec.key for result in results] == list(tensors)
    assert Counter(checkpoint.source.reads) == {"w": 2, "w@exp_avg": 1, "w@exp_avg_sq": 3}
