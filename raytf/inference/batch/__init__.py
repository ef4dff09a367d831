"""Predictions for a data set: columns (which go where), reader and writer (data in and out), predict (on Ray Data)."""
