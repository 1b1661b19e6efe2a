"""The page Jobs."""
