"""A Llama as functions over pytrees; `llamaspec.load` opens a checkpoint."""
