"""The driver's process: `fit`, preflight checks, Ray Train's adapters, supervision.

May use everything but tune, testing and commands. The entry point is `raytf.driver.fit.fit`.
"""
