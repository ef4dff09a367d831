"""All that raytf takes of Ray's insides, which may change with any version.

A module for each part of Ray, so that a process imports what it needs and nothing else. Each says in `SEEN` what it
takes and in which version that was last seen to be there and to do what is meant; `tests/unit/test_private_ray.py`
fails when something has gone, and when another module of raytf takes something private. Knows nothing of raytf.
"""
