"""The store of a tiled run on the disk: shards, the log that commits them, and what is checked of both."""
