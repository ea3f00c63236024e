"""Readers of model checkpoints (files and directories of weights), which give access to one tensor at a time.

This module does not import the writers, so a program that only reads checkpoints starts faster. Import each writer from
its own module.
"""

from llamaspec.model.checkpoints.checkpoint import Checkpoint as Checkpoint
from llamaspec.model.checkpoints.checkpoint import CheckpointError as CheckpointError
from llamaspec.model.checkpoints.checkpoint import Tensor as Tensor
from llamaspec.model.checkpoints.checks import check_finite as check_finite
from llamaspec.model.checkpoints.open import open_checkpoint as open_checkpoint
from llamaspec.model.tensors import tensor_shapes as tensor_shapes
