"""Predictions for a data set: which columns go where (columns), what is read (reading), written (sink) and run (run)."""
