"""All recipes, in the order in which they run."""

from __future__ import annotations

from recipes.reproduce.papers import (
    beta_batch,
    bild,
    block,
    chen_figure_1,
    chen_table_1,
    distill_grid,
    draft_size,
    experts,
    leviathan_figures,
    leviathan_tables,
    mentored_chart,
    mentored_curve,
    mjgd,
    mjsd_figure_3,
    mjsd_figure_4,
    mjsd_table_1,
    mjsd_table_2,
    mjsd_table_3,
    mtad,
    online_shift,
    prompt_lookup,
    spec_bench,
    spectr,
    staged,
    trees,
)
from recipes.reproduce.recipe import Recipe

RECIPES: tuple[Recipe, ...] = tuple(
    module.RECIPE
    for module in (
        leviathan_tables,
        leviathan_figures,
        chen_figure_1,
        chen_table_1,
        block,
        spectr,
        prompt_lookup,
        mjsd_table_1,
        mjsd_table_2,
        mjsd_table_3,
        mjsd_figure_3,
        mjsd_figure_4,
        mjgd,
        mtad,
        mentored_curve,
        mentored_chart,
        bild,
        staged,
        trees,
        draft_size,
        beta_batch,
        experts,
        distill_grid,
        online_shift,
        spec_bench,
    )
)
