"""Sums of arrays over all ranks: on one host, between hosts, and by TensorFlow's collectives."""
