"""Checkpoints: files and directories of weights, tensor by tensor.

Import writers from their own modules: programs that only read then start faster.
"""

from model.checkpoints.checkpoint import Checkpoint as Checkpoint
from model.checkpoints.checkpoint import CheckpointError as CheckpointError
from model.checkpoints.checkpoint import Tensor as Tensor
from model.checkpoints.checks import check_finite as check_finite
from model.checkpoints.open import open_checkpoint as open_checkpoint
from model.tensors import tensor_shapes as tensor_shapes
