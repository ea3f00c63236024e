"""Programs that time or compile our code; `results/` keeps summaries of their figures, each with its machine."""
