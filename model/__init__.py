"""A Llama model as functions over pytrees. `llamaspec.load` opens a checkpoint."""
