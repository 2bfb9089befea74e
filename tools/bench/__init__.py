"""Speed against a peer, measured in one process: `python tools/bench/run.py`."""
