"""Measurements of rankgate on this machine, always as ratios within one run."""
