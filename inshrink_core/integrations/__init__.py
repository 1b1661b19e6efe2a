"""Adapters to the libraries that people train with, one module a library.

Each needs the extra named after it (``pip install 'inshrink[hf]'``), and holds no logic of its own: queue,
spool and storage are `inshrink_core.training`'s.
"""
