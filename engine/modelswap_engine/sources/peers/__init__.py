"""Other pods of the slot as a place to get bytes from: asked by hash before the source is, and never believed."""
