"""The place Run: the map, the bits, and writing an archive."""
