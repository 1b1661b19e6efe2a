"""The other published systems as codecs, one file each, and what they share."""
