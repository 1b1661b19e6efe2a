"""The Inshrinkerator codec: non-uniform quantization with pruning, protection and a delta of symbols."""
