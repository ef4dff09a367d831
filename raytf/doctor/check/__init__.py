"""Checks of a cluster's YAML, which find before money is spent what Ray finds late or never."""
