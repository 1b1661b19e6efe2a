"""Quantization: fits of codebooks to histograms, and look-up tables of codebooks."""
