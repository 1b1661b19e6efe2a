"""Other published systems as codecs, one file each, and their shared base classes."""
