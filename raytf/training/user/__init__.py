"""The user's program in a worker: transfers callbacks, objects, files and errors to the worker and back."""
