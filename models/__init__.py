"""Model families: layers, one file a family, loaders, shipped heads."""
