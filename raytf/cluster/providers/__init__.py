"""Ray's node providers of AWS, Google Cloud and Azure, which go on to the next machine where there is no capacity."""
