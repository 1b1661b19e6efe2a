"""Benchmarks behind every number in README and docs: `make bench` writes benchmarks/results/*.csv."""
