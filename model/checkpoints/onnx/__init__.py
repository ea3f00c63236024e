"""ONNX, the exchange format of neural networks (https://onnx.ai): writes a model as a graph of standard operators."""
