"""The page Allocate."""
