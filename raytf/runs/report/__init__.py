"""A run as one page: `page.draw`."""
