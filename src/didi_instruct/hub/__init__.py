"""Models as sources: find and load them, describe them, write and publish them."""
