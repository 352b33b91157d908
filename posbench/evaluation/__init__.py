"""Score finished runs at lengths within and beyond the training length: protocols, scoring, stored results."""
