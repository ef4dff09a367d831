"""GPUs: which of them a process may see, whether they are fit for a group, and what their errors mean."""
