"""The governor: chooses draft lengths by what it measures while the engine runs."""
