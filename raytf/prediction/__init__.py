"""Predictions for a data set: columns (which go where), reading and sink (data in and out), run (on Ray Data)."""
