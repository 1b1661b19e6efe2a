"""Bundled sample runs, located by inshrink_core.samples."""
