"""Checkpoints: files and directories of weights, read and written tensor by tensor."""

from model.checkpoints.checkpoint import Checkpoint as Checkpoint
from model.checkpoints.checkpoint import CheckpointError as CheckpointError
from model.checkpoints.checkpoint import Tensor as Tensor
from model.checkpoints.checkpoint import tensor_shapes as tensor_shapes
from model.checkpoints.checks import check_finite as check_finite
from model.checkpoints.gguf_writer import write_gguf as write_gguf
from model.checkpoints.huggingface_writer import write_huggingface as write_huggingface
from model.checkpoints.llama2c_writer import write_llama2c as write_llama2c
from model.checkpoints.open import open_checkpoint as open_checkpoint
