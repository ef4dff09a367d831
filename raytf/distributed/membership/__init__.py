"""Membership of a group of workers: generations, rendezvous, and liveness of peers. Does not load TensorFlow."""
