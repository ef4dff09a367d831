"""The private parts of Ray that raytf uses. They may change with any version.

A module for each part of Ray, so that a process imports what it needs and nothing else. Knows nothing of raytf.
`tests/unit/test_private_ray.py` fails when something that these modules take is gone, and when another module of raytf
takes something private.
"""
