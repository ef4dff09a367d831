"""Checks of a cluster's YAML. They find mistakes that Ray reports late or never, before money is spent."""
