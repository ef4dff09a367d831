"""Notices of preemption: where clouds announce them, who watches, and how Ray drains the node."""
