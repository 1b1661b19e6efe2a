"""Modes of `compress`: in parts, and beside a training."""
