"""Every verb ended at system calls, its writes failed, its power cut: ``python -m benchmarks.crash``."""
