"""Jobs of Ray's job server: submission, resubmission and the files that travel with them."""
