"""Verbs that change a history: release of originals."""
