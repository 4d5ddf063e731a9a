"""The laboratory: certificates, frontiers and profiles of the user's own models and settings."""
