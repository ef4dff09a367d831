"""How ranks find each other and add: groups, reductions, the wire format, devices, and GPUs (`gpu`).

All groups have one interface, `raytf.distributed.group.Group`, and one principle: Keras sees no strategy. Variables are
plain `tf.Variable`s, micro-batches are computed outside of the strategy's scope, and the strategy does what it is for:
it knows the devices or the cluster, and adds. So a compiled loss keeps its scale (Keras divides it by the number of
replicas inside of `strategy.run`), what layers, optimizers and callbacks do is the same everywhere, and with
fixed-point sums all of these strategies compute the same bits. That is why a run may be stopped under one of them and
go on under another.

Knows config, data and storage; nothing of checkpoints, runs or training. The entry is `raytf.distributed.factory.make`.
"""
