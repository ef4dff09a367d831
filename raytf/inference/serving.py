"""A model behind the REST API of TensorFlow Serving, on Ray Serve.

What a request asks for, and its answer: api, numbers, tensors, writing, refusals. Versions: choice, shelf. Replicas and
the driver's side: replica, app. What stands before replicas, in Ray Serve's proxy: wire, front, limits, spool,
exchange.
"""
