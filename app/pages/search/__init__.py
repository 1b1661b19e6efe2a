"""The page Search."""
