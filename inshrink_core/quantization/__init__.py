"""From histograms to codebooks, and from codebooks to look-up tables."""
