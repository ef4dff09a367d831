"""Clients of clouds, Kubernetes and hosts: accounts, REST, kubectl and SSH."""
