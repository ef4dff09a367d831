"""Ways to distribute: each module offers a `Group`."""
