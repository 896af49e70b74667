"""The global sample stream: order, length and blend of the samples, and the batches that each rank loads."""
