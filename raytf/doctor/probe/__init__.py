"""The online part of `raytf check`: asks the cloud's own API about a cluster YAML, read-only and within seconds."""
