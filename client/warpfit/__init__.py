"""warpfit: expression evaluation for symbolic regression, on a GPU, through the network."""
