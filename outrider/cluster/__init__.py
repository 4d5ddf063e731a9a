"""What runs on several processes or machines."""
