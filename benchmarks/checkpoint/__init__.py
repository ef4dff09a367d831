"""What checkpoints cost, on storage and in memory."""
