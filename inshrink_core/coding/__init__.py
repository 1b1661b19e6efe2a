"""Entropy coders."""
