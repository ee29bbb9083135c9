"""The demo: a whole hand-off on this machine, without a GPU."""
