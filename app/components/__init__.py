"""Widgets used by more than one page."""
