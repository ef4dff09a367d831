"""A model behind the REST API of TensorFlow Serving: the API (api), which versions (choice, shelf), Ray Serve (replica, app)."""
