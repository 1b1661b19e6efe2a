"""Evaluators that benchmark runs carry: each file stands alone, and is copied into the run's folder."""
