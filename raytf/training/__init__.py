"""What a worker process does: build the model, micro-batches, step, callbacks, evaluation, exact mode, the loop.

Knows everything below it (inference exports the trained model at a run's end); nothing of the driver, which is told by
the handle of its monitor actor. The entry is `raytf.training.worker.run`.
"""
