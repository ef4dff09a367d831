"""Membership of a group of workers: generations, rendezvous, and liveness of peers. It loads no TensorFlow."""
