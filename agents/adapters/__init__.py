"""From what people have (a model's config.json, an engine's own structs) to what a rank registers."""
