"""One published result per file: what the paper reports, and the function that measures it."""
