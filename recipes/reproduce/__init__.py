"""One recipe per published table or figure: what was measured here, and whether it agrees.

    python -m recipes.reproduce                     all recipes; also: make reproduce
    python -m recipes.reproduce block chen-figure-1 some of them
    python -m recipes.reproduce --quick             small and without timing, on the embedded pair

effect      one claim with its size, interval and error probability
outputs     numbers of single outputs, which effects compare
recipe      a recipe, its findings and its verdict
subject     the models and prompts that recipes run on, and how much they run
lab         what a recipe measures with; everything that is measured is kept and not run again
document    a recipe's result as JSON; page and figure show it as docs/reproduce/NAME.md
catalogue   all recipes; each is a file of its own
"""
