"""KV caches: preallocated buffers per layer, with a length per row."""
