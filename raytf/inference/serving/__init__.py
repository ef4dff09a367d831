"""Serves a model on Ray Serve, with the REST API of TensorFlow Serving.

Requests and answers: rest_api, json_tensors. Versions: served_versions. Replicas and the driver's side: replica,
application. In Ray Serve's proxy, in front of the replicas: connections, front, limits, exchange.
"""
