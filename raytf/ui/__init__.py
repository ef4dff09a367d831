"""The pages of `raytf ui`: the runs of a storage, live and read-only."""
