"""The engine (index to come)."""
