"""A model behind the REST API of TensorFlow Serving, on Ray Serve.

What a request asks for, and its answer: rest_api, json_tensors. Versions: served_versions. Replicas and the driver's
side: replica, application. What stands before replicas, in Ray Serve's proxy: connections, front, limits, exchange.
"""
