"""Conformance suites for codecs, run layouts and archives: shipped, so that others can use them."""
