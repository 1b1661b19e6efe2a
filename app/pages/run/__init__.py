"""The place Run: the map, the bits, and the card that writes an archive."""
