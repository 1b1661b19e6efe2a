"""What a checkpoint's pickle describes, read without running it."""
