"""The online part of `raytf check`: checks a file against its cloud, API server or hosts, within seconds."""
