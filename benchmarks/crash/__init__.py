"""Ends every verb at random system calls, fails its writes, and cuts its power: ``python -m benchmarks.crash``."""
