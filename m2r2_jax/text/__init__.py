"""Token ids from text and back, and chat templates."""
