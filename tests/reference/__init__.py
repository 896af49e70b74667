"""What a run computes, by definition: the product on one process is compared with it."""
