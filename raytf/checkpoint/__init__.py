"""The state beyond the life of a process: formats, the commit, the durable tier, the memory tier, restore.

Knows storage, data, cluster and distributed; nothing of what a run records or of the training loop. Entries:
`raytf.checkpoint.commit.Commit` writes to a `raytf.checkpoint.tier.Writing`, of which `raytf.checkpoint.durable` and
`raytf.checkpoint.memory` are the two; `raytf.checkpoint.restore.Restorer` reads both.
"""
