"""Programs that assert what raytf promises for as long as you like: `python -m tests.stress...`. pytest has samples."""
