"""Workers that run other engines, each in its own process and environment."""
