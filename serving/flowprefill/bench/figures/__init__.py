"""Figures: every claim in numbers, measured on the machine at hand, as ratios within one run."""
