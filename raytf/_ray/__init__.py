"""The private parts of Ray that raytf uses. They may change with any version.

Each part of Ray has a module, so that a process imports only what it needs. This package depends on no other part of
raytf. `tests/unit/test_private_ray.py` fails when a private part that these modules use no longer exists, or when
another module of raytf uses one.
"""
