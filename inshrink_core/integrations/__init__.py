"""Adapters to training libraries, one module for each.

Each needs an extra (``pip install 'inshrink[hf]'``). Queue and spool are those of `inshrink_core.training`.
"""
