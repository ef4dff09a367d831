"""Programs that assert what raytf promises for as long as one likes: `python -m tests.stress...`, not collected by pytest."""
