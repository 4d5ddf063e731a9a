"""Drafters that combine several sources: one source chosen per row, or all merged into a tree."""
