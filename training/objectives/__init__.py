"""Objectives: what a training minimizes, one file each. `reference.losses` defines them, each with its gradient."""
