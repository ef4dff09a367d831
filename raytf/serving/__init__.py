"""A model behind the REST API of TensorFlow Serving: api, versions (choice, shelf), Ray Serve (replica, app)."""
