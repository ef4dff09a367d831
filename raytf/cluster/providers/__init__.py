"""Ray's node providers for AWS, Google Cloud and Azure, extended to try other machines if one has no capacity."""
