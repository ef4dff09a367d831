"""The online part of `raytf check`: what the cloud's own API says of a cluster YAML, read-only and within seconds."""
