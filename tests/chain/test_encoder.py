"""What encoding a frame reads of a checkpoint."""

from dataclasses import replace

import pytest

from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain import ChainConfig, ChainWriter, PreparedFrame
from inshrink_core.codec import get_codec
from inshrink_core.search.measure import encode_step
from tests.builders import memory_checkpoint, seeded


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
        prepared = PreparedFrame(encoded.plan, state, encoded.results)
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
