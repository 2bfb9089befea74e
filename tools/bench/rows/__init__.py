"""One module for each row; see `tools.bench.harness.Row`."""
