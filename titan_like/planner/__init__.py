"""What a run will need and how long it will take, before it starts. Pure mathematics: no processes, no tensors."""
