"""Where weights live. The rest of the program sees affine maps and never a raw weight."""
