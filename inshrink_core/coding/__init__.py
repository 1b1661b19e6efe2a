"""Entropy coders: bytes in the fewest bits, and back."""
