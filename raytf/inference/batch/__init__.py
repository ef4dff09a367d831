"""Predicts for a data set: columns (inputs and outputs), reader and writer (files), predict (on Ray Data)."""
