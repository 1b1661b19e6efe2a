"""The moments codec: optimizer state by its scale and its direction."""
