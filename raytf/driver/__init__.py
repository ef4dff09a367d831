"""The driver process: `fit`, preflight checks, adapters for Ray Train, and supervision.

May import every package except tune, testing and commands. The entry point is `raytf.driver.fit.fit`.
"""
