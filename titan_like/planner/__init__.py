"""What a run will need and how long it will take, computed before it starts."""
