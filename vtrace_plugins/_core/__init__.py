"""The scan, and nothing else: imports torch and (lazily) triton, never an RL library."""
