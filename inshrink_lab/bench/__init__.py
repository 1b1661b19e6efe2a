"""Benchmark of codecs on one run: the largest measured ratio that keeps a bound."""
