"""Kernels of the verification rules. Their definitions are the rules of `specdec.verify`."""
