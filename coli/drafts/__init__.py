"""Draft sources: they only propose; never import model or store."""
