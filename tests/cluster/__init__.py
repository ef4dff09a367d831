"""Clusters of hosts that are namespaces of this machine, started by Ray's own `ray up`."""
