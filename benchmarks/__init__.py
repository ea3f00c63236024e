"""What is timed or compiled to see how fast it is; `results/` keeps the figures with their machine beside them."""
