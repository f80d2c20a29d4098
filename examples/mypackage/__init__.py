"""An environment of one's own, as the README registers it."""
