"""The state beyond the life of a process: formats, the commit, the durable tier, the memory tier, restore.

Knows storage, data, cluster and distributed; nothing of what a run records or of the training loop. Entries:
`raytf.checkpoint.commit.Commit` completes the saves of `raytf.checkpoint.durable`, `raytf.checkpoint.memory` copies
into the memory of nodes, and `raytf.checkpoint.restore.Restorer` reads both.
"""
