"""What only a cloud, a host or an API server can say about a cluster YAML, asked before anything is started."""
