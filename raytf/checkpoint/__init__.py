"""Everything that makes a state outlive its process: formats, the commit, the durable tier, the memory tier, restore.

Knows storage, data, cluster and distributed; nothing of what a run records or of the training loop. Entries:
`raytf.checkpoint.durable` and `raytf.checkpoint.snapshots` write, `raytf.checkpoint.restore` reads.
"""
