"""The backward pass: how each layer passes gradients back. One file per layer.

A layer computes y from its inputs. Training needs to know how the loss L changes with each input. It first computes how
L changes with y: the array dy, with the shape of y, is dL/dy. The chain rule then gives

    dx_i = sum_j dy_j (d y_j / d x_i)

and each file writes this sum out for one layer. A function takes the inputs of its layer and dy. It returns one
gradient for each input that is an activation or a weight, in the order of the inputs, in float64.

Read `linear` first, then `rmsnorm`, `softmax`, `attention`. `llama` combines them.
"""
