"""Keras programs in the shapes of those on keras.io, run as they are: `python -m tests.stress.keras_examples`."""
