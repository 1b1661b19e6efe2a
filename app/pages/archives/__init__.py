"""Archives: the archives of a run, and everything that is done with them."""
