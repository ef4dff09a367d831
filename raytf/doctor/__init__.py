"""What tells people about their clusters: mistakes in files, what a cloud says of them, and what was left. No run imports it."""
