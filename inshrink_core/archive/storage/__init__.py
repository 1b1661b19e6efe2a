"""Storages of archives; ``docs/guides/storage.md`` explains how to add one.

All data of an archive pass through a `Storage`. Only this package handles folders and URLs; the rest of
`inshrink_core.archive` addresses objects by name.
"""
