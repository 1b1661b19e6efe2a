"""Modes of verbs with a request and a report of their own."""
