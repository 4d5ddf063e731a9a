"""What rounds and distributions say about a method; drives no model. Knows ``core`` alone."""
