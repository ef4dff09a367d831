"""The code of a worker process: building the model, micro-batches, step, callbacks, evaluation, exact mode, loop.

This package may import every layer below it, such as inference, which exports the trained model at the end of a run.
It must not import the driver, which it reaches through the handle of the driver's monitor actor. The entry point is
`raytf.training.worker.run`.
"""
