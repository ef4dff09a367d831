"""The peers: each script follows its project's own guide, at its best settings."""
