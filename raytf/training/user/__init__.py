"""The user's program in a worker: callbacks, objects, files and errors, on their way there and back."""
