"""Execution of independent jobs on threads, with devices, memory limits and cached results."""
