"""Measurements that commands run: `llamaspec bench`, `profile` and `inspect --plan`."""
