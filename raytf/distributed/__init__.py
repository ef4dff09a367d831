"""The group in which ranks add tensors: groups, reductions, the wire format, devices, and GPUs (`gpu`).

All groups have one interface, `raytf.distributed.group.Group`, and one principle: Keras does not see the strategy.
Variables are plain `tf.Variable`s, micro-batches are computed outside the strategy's scope, and the strategy only knows
the devices or the cluster, and adds. A compiled loss therefore keeps its scale (inside `strategy.run` Keras divides it
by the number of replicas), and layers, optimizers and callbacks behave the same everywhere. With fixed-point sums, all
strategies compute the same bits, so a run can stop under one strategy and resume under another.

Uses config, data and storage, but not checkpoints, runs or training. The entry point is `raytf.distributed.group.make`.
"""
