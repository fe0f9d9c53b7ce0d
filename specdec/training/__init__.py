"""Training of draft heads: token data, the unrolled head, objectives, optimisers, checkpoints."""
