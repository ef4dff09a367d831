"""How clouds, Kubernetes and hosts are asked: accounts, REST, kubectl and SSH."""
