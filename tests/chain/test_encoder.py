"""What encoding a frame reads of a checkpoint."""

from collections import Counter
from dataclasses import replace

import pytest

from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain import ChainConfig, ChainState, ChainWriter, FrameEncoder, PreparedFrame
from inshrink_core.codec import get_codec
from inshrink_core.search.measure import encode_step
from tests.builders import memory_checkpoint, seeded


def test_second_moments_are_read_to_plan_and_for_first_moments_but_not_again_for_weights():
    tensors = {
        "w": seeded((64, 64), 0),
        "w@exp_avg": seeded((64, 64), 1),
        "w@exp_avg_sq": seeded((64, 64), 2).square(),
    }
    checkpoint = memory_checkpoint(1, tensors)
    _, results = FrameEncoder(ChainConfig(config=get_codec("lattice")())).encode(checkpoint, ChainState())
    assert [result.spec.key for result in results] == list(tensors)
    assert Counter(checkpoint.source.reads) == {"w": 2, "w@exp_avg": 2, "w@exp_avg_sq": 3}


@pytest.mark.parametrize("other", ["none", "config", "checkpoint", "state"])
def test_what_was_prepared_is_taken_over_only_where_it_would_be_encoded_again(tmp_path, other):
    first, second = (
        memory_checkpoint(step, {"w": seeded((64, 64), step), "w@exp_avg": seeded((64, 64), 9)})
        for step in (1, 2)
    )
    chain = ChainConfig(config=get_codec("lattice")())
    with ArchiveWriter(tmp_path / "a", create=True) as writer:
        lines = ChainWriter(writer, chain)
        lines.append(first)
        state = lines.state(keyframe=False, specs=second.specs)
        encoded = encode_step(chain, second, state)
        prepared = PreparedFrame(chain, second, state, encoded.plan, encoded.results)
        if other == "config":
            lines.config = replace(
                chain, config=replace(chain.config, coarseness=2 * chain.config.coarseness)
            )
        target = replace(second) if other == "checkpoint" else second
        appended = lines.append(target, keyframe=other == "state", prepared=prepared)
        assert appended.as_prepared == (other == "none")
        frame = lines.archive.frame(appended.info)
        same = frame.read(frame.entry("w")) == encoded.results["w"].block.payload
        assert same == (other in ("none", "checkpoint"))
