"""Several drafters at once: one chosen per row, or all merged into one tree."""
