"""The monitor: an actor that workers and Ray Train's controller report to (`actor`), and its reader in the driver
(`reader`).
"""
