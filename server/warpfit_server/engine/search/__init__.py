"""The search for formulas in an engine; `driver` tells it in order."""
