"""Codecs, each in a file or a package of its own; `inshrink_core.codec` has the contract."""
