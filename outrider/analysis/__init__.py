"""What rounds and laws say about a method; drives no model. Knows ``core`` alone."""
