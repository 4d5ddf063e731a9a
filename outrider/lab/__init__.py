"""Measurements that users run on models and settings of their own."""
