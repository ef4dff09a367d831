"""The machines around a run: connect to Ray, follow preemption notices, submit jobs, provision and clean up.

Entries: `raytf.cluster.connect`, `raytf.cluster.submission` and `raytf.cluster.providers`.
"""
