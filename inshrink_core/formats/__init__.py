"""Placeholder: its builder writes the table of contents."""
