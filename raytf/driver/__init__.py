"""What the driver process does: `fit`, preflight, Ray Train's adapters, supervision.

Knows everything but tune, testing and commands. The entry is `raytf.driver.fit.fit`.
"""
