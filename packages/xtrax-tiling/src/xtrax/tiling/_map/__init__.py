"""The chunked map: how an axis is cut, the loop as a JAX primitive, and a call of `tiled_vmap`."""
