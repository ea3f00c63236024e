"""Draws a model and one of its blocks from its ONNX graph: `llamaspec inspect MODEL --graph FILE.svg`."""
