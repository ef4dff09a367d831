"""The group that ranks form to add tensors: groups, reductions, the wire format, devices, and GPUs (`gpu`).

All groups have one interface, `raytf.distributed.group.Group`, and one principle: Keras does not see the strategy.
Variables are plain `tf.Variable`s, micro-batches are computed outside the strategy's scope, and the strategy only knows
the devices or the cluster, and adds. So a compiled loss keeps its scale (inside `strategy.run` Keras divides it by the
number of replicas), layers, optimizers and callbacks behave the same everywhere, and with fixed-point sums all of these
strategies compute the same bits. So a run can stop under one of them and resume under another.

Uses config, data and storage, but not checkpoints, runs or training. The entry point is
`raytf.distributed.group.make`.
"""
