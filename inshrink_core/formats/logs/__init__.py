"""Logs beside the checkpoints of a training: metrics in any file, and TensorBoard events."""
