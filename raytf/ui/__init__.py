"""The pages of `raytf ui`: the runs of a storage, live, and nothing that changes them."""
