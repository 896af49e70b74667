"""The global sample stream: its order, its length, its mixture, and the batches that each rank loads."""
