"""The code of a worker process: building the model, micro-batches, step, callbacks, evaluation, exact mode, loop.

May import every layer below it (inference exports the trained model at the end of a run), but nothing of the driver,
which it reaches through the handle of the driver's monitor actor. The entry point is `raytf.training.worker.run`.
"""
