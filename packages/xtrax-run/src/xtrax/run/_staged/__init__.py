"""What the sinks share to which results are staged by key, and how two of the formats are written."""
