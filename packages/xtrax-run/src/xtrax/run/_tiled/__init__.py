"""How `run_tiled` works: a request is checked, a session opened, and its tiles are read, computed and written."""
