"""The experiments: each script here is one measurement."""
