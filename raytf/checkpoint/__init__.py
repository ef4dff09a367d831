"""State that outlives a process: formats, the commit, the durable tier, the memory tier, restore.

It depends on storage and distributed, but not on a run's records or the training loop. Entry points:
`raytf.checkpoint.commit.Commit` completes the saves of `raytf.checkpoint.durable`, `raytf.checkpoint.memory` copies
into the memory of nodes, and `raytf.checkpoint.restore.Restorer` reads both.
"""
