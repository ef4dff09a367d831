"""The control plane as workers grow, measured and modelled."""
