"""Programs together with their derivatives, for both engines."""
