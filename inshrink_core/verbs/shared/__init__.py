"""Shared code of the verbs: option groups, parsing of values, stored measurements, report texts."""
