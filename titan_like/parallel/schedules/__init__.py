"""Pipeline schedules as pure functions: the order of computations and messages on each rank, and how long they take."""
