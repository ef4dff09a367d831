"""Who belongs to a group of workers, how its ranks find each other, and how they notice a loss. No TensorFlow."""
