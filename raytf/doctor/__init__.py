"""Reports on clusters: mistakes in files, answers of clouds, and leftovers. No run imports it."""
