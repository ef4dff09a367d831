"""Preflight of a cluster's YAML: finds, before money is spent, what Ray finds late or never."""
