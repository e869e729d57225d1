"""Pure step functions, cut into stages, and the layers that they share."""
