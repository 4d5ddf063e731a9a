"""Mathematics of the laboratory: formulas of speed and acceptance, estimators, frontiers, best
trees. Imports only core; the modules of formulas import no torch code of their own."""
