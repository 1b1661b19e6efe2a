"""Archives: the archives of a run, and all actions on them."""
