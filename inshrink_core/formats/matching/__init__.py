"""Match numbered optimizer state to parameters: by order, by values, by code."""
