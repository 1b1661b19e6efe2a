"""Codecs: compositions of the stages, one file each, found by name through `inshrink_core.codec`."""
