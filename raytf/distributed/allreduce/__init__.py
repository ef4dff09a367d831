"""How arrays of all ranks become one sum: on one host, between hosts, and by TensorFlow's collectives."""
