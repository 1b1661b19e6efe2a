"""The page Sensitivity."""
