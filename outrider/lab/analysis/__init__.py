"""Mathematics of the laboratory: acceptance against divergence, best trees. Imports only core."""
