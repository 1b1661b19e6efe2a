"""The Inshrinkerator codec: non-uniform quantization with pruning, protection and deltas of symbols."""
