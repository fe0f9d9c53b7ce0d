"""Errors that a user meets: one line that names the value and the fix."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read, lacks a tensor, or carries one that nothing uses."""
