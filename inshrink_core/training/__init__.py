"""Beside a training: saving it, watching it, and rehearsing its failures."""
