"""The machines around a run: connect to Ray, follow preemption notices, submit jobs, provision and clean up.

Knows config, data and storage; nothing of training. Entries: `raytf.cluster.connect`,
`raytf.cluster.jobs.submission` and `raytf.cluster.providers`.
"""
