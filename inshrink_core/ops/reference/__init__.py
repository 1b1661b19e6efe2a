"""The norm of every op, in plain torch and plain Python: read it to know the rule."""
