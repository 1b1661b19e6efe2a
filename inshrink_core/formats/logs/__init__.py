"""What a training logged beside its checkpoints: metrics in any file, and TensorBoard events."""
