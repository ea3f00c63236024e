"""Objectives: the losses that a training minimizes, one per file. `reference.losses` defines losses and gradients."""
