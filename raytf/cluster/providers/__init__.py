"""Ray's node providers of AWS, Google Cloud and Azure, which try the next machine if there is no capacity."""
