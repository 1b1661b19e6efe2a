"""Codecs: the contract, and the built-in ones, each in a file or a package of its own.

A codec is its settings: a frozen dataclass that encodes and decodes. `get_codec` finds its class by name.

Examples
--------
>>> from inshrink_core.codecs import make_codec
>>> make_codec("lattice", {"coarseness": 2.0}).settings()["coarseness"]
2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core.codec import Codec as Codec
    from inshrink_core.codec import Encoded as Encoded
    from inshrink_core.codec import Knob as Knob
    from inshrink_core.codec import TensorInput as TensorInput
    from inshrink_core.codec import TensorReference as TensorReference
    from inshrink_core.codec import Tuning as Tuning
    from inshrink_core.codec import codec_names as codec_names
    from inshrink_core.codec import get_codec as get_codec
    from inshrink_core.codec import make_codec as make_codec
    from inshrink_core.codecs.variants import Variant as Variant
    from inshrink_core.codecs.variants import compared_variants as compared_variants
    from inshrink_core.codecs.variants import parse_variants as parse_variants

__all__ = index(__name__)
