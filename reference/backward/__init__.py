"""The backward pass: what each layer makes of the gradient that reaches it, a file a layer.

A layer computes y from its inputs. Training asks how a loss L changes with each input, and learns first how L
changes with y: the array dy, of the shape of y, stands for dL/dy. The chain rule gives the rest,

    dx_i = sum_j dy_j (d y_j / d x_i)

and each file here writes this sum out for one layer. A function takes what its layer took and then dy, and returns
one gradient for each input that is computed or learned, in the order of the inputs. All of it is float64.

Read `linear` first, then `rmsnorm`, `softmax`, `attention`; `llama` puts them together.
"""
